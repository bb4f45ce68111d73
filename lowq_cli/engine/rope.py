"""Rotary angles from a config: transformers' frequencies bit for bit, without its modeling code."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lowq_cli.files.family_config import ROPES

Tables = tuple[torch.Tensor, torch.Tensor]  # cos, sin (slots, R)


def why_not(rope: Mapping[str, Any] | None) -> str | None:
    """The reason the angles of a config's rope_parameters cannot be made here, or None."""
    for r in by_kind(rope).values():
        if r.get("rope_type") not in ROPES:
            return f"rotary angles of the kind {r.get('rope_type')}, which may depend on the length of the text"
    return None


def by_kind(rope: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Kind of layer -> its rope_parameters; {"": rope_parameters} where all layers share one."""
    found = {kind: r for kind, r in (rope or {}).items() if isinstance(r, Mapping)}
    return found or {"": rope or {}}


def tables(rope: Mapping[str, Any], D: int, slots: int, device: torch.device, dtype: torch.dtype, partial: bool) -> Tables:
    """cos, sin (slots, R), R = D but for a partial_rotary_factor.

    Args:
        rope: rope_parameters of one kind of layer, with rope_type and rope_theta.
        D: head dim.
        partial: whether the factor holds without scaling, too.
    """
    inverse, factor = frequencies(rope, D, partial)
    angles = torch.arange(slots, device=device)[:, None].float() * inverse.to(device)
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()


def frequencies(rope: Mapping[str, Any], D: int, partial: bool) -> tuple[torch.Tensor, float]:
    """Radians a position turns each pair by, (R // 2,) fp32, and what cos and sin are multiplied by.

    Sources: linear: Chen et al. 2023 (arXiv:2306.15595); yarn: Peng et al. 2023 (arXiv:2309.00071); llama3: Llama 3.1's code.
    """
    kind, base = rope["rope_type"], rope["rope_theta"]
    share = rope.get("partial_rotary_factor") or 1.0
    R = int(D * share) if partial or kind != "default" else D
    powers = base ** (torch.arange(0, R, 2, dtype=torch.float) / R)
    inverse = 1.0 / powers
    if kind == "linear":
        inverse /= rope["factor"]
    elif kind == "llama3":
        inverse = _llama3(inverse, rope)
    elif kind == "yarn":
        return _yarn(powers, R, base, rope)
    return inverse, 1.0


def _llama3(inverse: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths divided by `factor`, short ones kept, those between interpolated."""
    low, high, was = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > was / low, inverse / rope["factor"], inverse)
    smooth = (was / wavelength - low) / (high - low)
    between = ~(wavelength < was / high) * ~(wavelength > was / low)
    return torch.where(between, (1 - smooth) * scaled / rope["factor"] + smooth * scaled, scaled)


def _yarn(powers: torch.Tensor, R: int, base: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies blended between kept and divided by `factor`, and the attention factor."""
    was, factor, mscale, of_all = (
        rope.get(k) for k in ("original_max_position_embeddings", "factor", "mscale", "mscale_all_dim")
    )
    assert was
    assert factor

    def grown(by: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    def pair_of(rotations: float) -> float:
        return (R * math.log(was / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    ramp = ((torch.arange(R // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    kept = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    attention = rope.get("attention_factor")
    if attention is None:
        attention = grown(mscale) / grown(of_all) if mscale and of_all else grown()
    return inverse, float(attention)
