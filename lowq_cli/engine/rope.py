"""Rotary angles from a config, bit for bit those of transformers, without its modeling code; and the context they allow.

Two kinds depend on the sequence's length: `dynamic` increases the base with the length past max_position_embeddings,
`longrope` has other factors past original_max_position_embeddings. A prompt is rotated by the angles of its length, a later
token by those of the sequence up to it; keys in the cache keep their rotation. The exception is longrope's change of factors:
there the sequence is read again (`rereads`), since queries under one set of factors see keys under the other as noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lowq_packers.arch.config import ROPES
from lowq_packers.errors import DamagedError, one_line
from lowq_packers.lazy import torch

Tables: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # cos, sin (slots, R)


def why_not(rope: Mapping[str, Any] | None) -> str | None:
    """The reason why lowq cannot compute the angles of a config's rope_parameters, or None; None without rope_parameters."""
    for r in by_kind(rope).values():
        if r and r.get("rope_type") not in ROPES:
            return f"rotary angles of the kind {r.get('rope_type')}"
    return None


def by_kind(rope: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Kind of layer -> its rope_parameters; {"": rope_parameters} where all layers share one."""
    parameters = {kind: r for kind, r in (rope or {}).items() if isinstance(r, Mapping)}
    return parameters or {"": rope or {}}


def reach(rope: Mapping[str, Any] | None, limit: int, stated: int | None = None) -> int:
    """Max. tokens of a sequence for these angles. limit: max_position_embeddings; stated: the config's max_sequence_length.

    Computed as in vLLM, except for linear: there max_position_embeddings is the limit either before stretching (Vicuna, whose
    max_sequence_length is the stretched one) or after it (DeepSeek Coder); beyond the stretched limit the output is noise.
    """
    if not rope or any(isinstance(r, Mapping) for r in rope.values()):
        return limit
    kind, factor, was = rope.get("rope_type"), rope.get("factor") or 1, rope.get("original_max_position_embeddings")
    stretched = {"dynamic": limit * factor, "yarn": (was or limit) * factor, "linear": (was or 0) * factor}
    return int(max(limit, stretched.get(str(kind), 0), (stated or 0) if kind == "linear" else 0))


@dataclass(frozen=True)
class Rotation:
    """The rotation of heads in one kind of layer.

    rope: rope_parameters, with rope_type and rope_theta. dims, of: as in `arch.parts.Rope`. limit: max_position_embeddings.
    """

    rope: Mapping[str, Any]
    dims: int
    of: int
    limit: int | None

    @property
    def steady(self) -> float:
        """Up to this many tokens the angles do not depend on the sequence's length."""
        kinds = {
            "dynamic": None if self.rope.get("alpha") else self.limit,
            "longrope": self.rope.get("original_max_position_embeddings"),
        }
        return kinds.get(self.rope["rope_type"]) or math.inf

    @property
    def rereads(self) -> bool:
        """Whether a sequence that grows past `steady` has to be read again."""
        return self.rope["rope_type"] == "longrope"

    def tables(self, slots: int, device: torch.device, dtype: torch.dtype, length: int | None = None) -> Tables:
        """cos, sin (slots, R), R = dims, or `of` if set. length: of the sequence; None: each slot is the sequence's last token.

        Raises DamagedError for angles that are missing or not finite, since torch's CPU attention turns NaN queries to zeros.
        """
        places = torch.arange(slots)[:, None]
        try:
            inverse, factor = self._frequencies(places + 1 if length is None else torch.tensor(length))
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as e:
            raise DamagedError(f"rope_parameters in config.json give no angles: {one_line(e)}") from e
        if not (bool((inverse * slots).isfinite().all()) and math.isfinite(factor)):
            raise DamagedError("rope_parameters in config.json give angles that are not finite")
        angles = places.to(device).float() * inverse.to(device)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cos.to(dtype).contiguous(), sin.to(dtype).contiguous()

    def _frequencies(self, lengths: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Radians per position for each pair, (R // 2,) or (slots, R // 2) fp32, and the attention factor of cos and sin.

        lengths: () or (slots, 1) int64, of the sequence. Sources: linear: Chen et al. 2023 (arXiv:2306.15595); yarn: Peng et
        al. 2023 (arXiv:2309.00071); longrope: Ding et al. 2024 (arXiv:2402.13753); llama3: Llama 3.1's code; dynamic: no paper,
        so transformers' code.
        """
        rope = self.rope
        kind, base, R = rope["rope_type"], rope["rope_theta"], self.dims
        if kind == "dynamic" and rope.get("alpha"):  # Hunyuan's: the base is fixed, whatever the length
            kind, base = "default", base * rope["alpha"] ** (R / (R - 2))
        pairs = torch.arange(0, R, 2, dtype=torch.float) / (self.of or R)
        powers = base**pairs
        inverse = 1.0 / powers
        if self.of:  # pairs over all `of` values; pairs past the first `dims` are not rotated
            return torch.cat([inverse / (rope.get("factor") or 1.0), torch.zeros((self.of - R) // 2)]), 1.0
        if kind == "linear":
            inverse /= rope["factor"]
        elif kind == "llama3":
            inverse = _llama3(inverse, rope)
        elif kind == "yarn":
            return _yarn(powers, R, base, rope)
        elif kind == "dynamic":
            factor = rope["factor"]
            limit = self.limit or 0
            grown = ((factor * lengths / limit) - (factor - 1)) ** (R / (R - 2))
            inverse = torch.where(lengths > limit, 1.0 / ((base * grown) ** pairs), inverse)
        elif kind == "longrope":
            short, long = (1.0 / (torch.tensor(rope[f"{n}_factor"], dtype=torch.float32) * powers) for n in ("short", "long"))
            return torch.where(lengths > self.steady, long, short), self._longrope_factor()
        return inverse, 1.0

    def _longrope_factor(self) -> float:
        given, was = self.rope.get("attention_factor"), self.rope["original_max_position_embeddings"]
        factor = self.rope.get("factor") or self.limit / was
        return float(given) if given is not None else 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(was))


def _llama3(inverse: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Frequencies of long wavelengths divided by `factor`, of short ones unchanged, of those between interpolated."""
    low, high, was = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > was / low, inverse / rope["factor"], inverse)
    smooth = (was / wavelength - low) / (high - low)
    between = ~(wavelength < was / high) * ~(wavelength > was / low)
    return torch.where(between, (1 - smooth) * scaled / rope["factor"] + smooth * scaled, scaled)


def _yarn(powers: torch.Tensor, R: int, base: float, rope: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies blended between unchanged and divided by `factor`, and the attention factor."""
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
    unscaled = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled
    attention = rope.get("attention_factor")
    if attention is None:
        attention = grown(mscale) / grown(of_all) if mscale and of_all else grown()
    return inverse, float(attention)
