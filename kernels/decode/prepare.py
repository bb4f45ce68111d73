"""The step between the products of q, k, v and attention, for layers that fused attention does not take, in torch.

`prepare` turns a layer's rows into what `reference.attend`, `attend_prompt` and `attend_packed` read without norms and with
the rotation `unrotated`: q, k, v of one head dim, concatenated. fp32 inside, rounded once.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from lowq_kernels.decode import norms
from lowq_kernels.decode.norms import Norm

Pairing = Literal["halves", "neighbours"]


@dataclass(frozen=True)
class PositionScale:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / period))."""

    beta: float
    period: float
    offset: int = 0


@dataclass(frozen=True)
class Prepared:
    """The layout of a row of qkv, and the operations on it. HQ, HKV, D as in `reference.Heads`.

    order "parts": q heads, k heads, v heads; "heads": q, k, v of head 0, then of head 1, ... (HKV = HQ).
    gated: each head of q is followed by D values of a gate. v_is_k: there is no v, values are keys before norm and rotation.
    writes: whether the layer has k and v; if not, it attends to another layer's cache.
    q_norm, k_norm, v_norm: over each head (`over` "head") or over all heads at once ("all"); v_norm always over each head.
    norm_last: q and k are normed after the rotation, else before it.
    pairing: of the R rotated dims, i is paired with i + R / 2 ("halves"), or 2 i with 2 i + 1 ("neighbours").
    """

    HQ: int
    HKV: int
    D: int
    order: Literal["parts", "heads"] = "parts"
    gated: bool = False
    v_is_k: bool = False
    writes: bool = True
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    over: Literal["head", "all"] = "head"
    norm_last: bool = False
    pairing: Pairing = "halves"
    key_scale: float = 1.0
    position_scale: PositionScale | None = None


def unrotated(slots: int, D: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables cos, sin (slots, D) of the identity, in the dtype and on the device of `like`: every kernel takes them."""
    return like.new_ones(slots, D), like.new_zeros(slots, D)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    """x (M, heads, D) fp32 with its first R dims rotated. cos, sin (M, R): the layout of "halves", each angle twice."""
    R = cos.shape[-1]
    c, s = (t[:, None, : R // 2].float() for t in (cos, sin))
    if pairing == "halves":
        one, two = x[..., : R // 2], x[..., R // 2 : R]
        parts = [one * c - two * s, two * c + one * s]
    else:
        one, two = x[..., 0:R:2], x[..., 1:R:2]
        parts = [torch.stack((one * c - two * s, two * c + one * s), -1).flatten(-2)]
    return torch.cat((*parts, x[..., R:]), -1)


def position_factors(pos: torch.Tensor, p: PositionScale) -> torch.Tensor:
    """(M, 1, 1) fp32 for positions (M,)."""
    return (1 + p.beta * torch.log1p(torch.floor((pos.float() + p.offset) / p.period)))[:, None, None]


def prepare(
    qkv: torch.Tensor, p: Prepared, pos: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """qkv (M, N) of tokens at positions pos (M,) -> (M, (HQ + 2 HKV) * D) = q, k, v heads side by side ((M, HQ * D) without
    k and v), and the gate (M, HQ * D) or None. cos, sin (S, R): one row per position, or None without a rotation."""
    q, k, v, gate = _parted(qkv, p)
    tables = None if cos is None or sin is None else (cos[pos.long()], sin[pos.long()])
    q = _rotated_and_normed(q.float(), p.q_norm, tables, p)
    if p.position_scale is not None:
        q = q * position_factors(pos, p.position_scale)
    heads = [q]
    if k is not None:
        v = k if v is None else v
        k = k.float() if p.key_scale == 1.0 else k.float() * p.key_scale
        heads += [_rotated_and_normed(k, p.k_norm, tables, p), v if p.v_norm is None else norms.in_fp32(v, p.v_norm)]
    return torch.cat([t.to(qkv.dtype).flatten(1) for t in heads], 1), gate


def _parted(
    qkv: torch.Tensor, p: Prepared
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """q (M, HQ, D), k and v (M, HKV, D) or None, the gate (M, HQ * D) or None."""
    k = v = gate = None
    if p.order == "heads":
        q, k, v = qkv.reshape(qkv.shape[0], p.HQ, 3, p.D).unbind(2)
        return q, k, v, gate
    wide = p.HQ * p.D * (2 if p.gated else 1)
    q, rest = qkv[:, :wide].unflatten(1, (p.HQ, -1)), qkv[:, wide:]
    if p.gated:
        q, gate = q[..., : p.D], q[..., p.D :].flatten(1)
    if p.writes:
        rest = rest.reshape(qkv.shape[0], -1, p.D)
        k, v = rest[:, : p.HKV], None if p.v_is_k else rest[:, p.HKV :]
    return q, k, v, gate


def _rotated_and_normed(
    x: torch.Tensor, norm: Norm | None, tables: tuple[torch.Tensor, torch.Tensor] | None, p: Prepared
) -> torch.Tensor:
    """Heads x (M, heads, D) fp32, normed before or after the rotation."""
    if tables is not None and p.norm_last:
        x = rotate(x, *tables, p.pairing)
    if norm is not None:
        x = norms.in_fp32(x, norm) if p.over == "head" else norms.in_fp32(x.flatten(1), norm).view_as(x)
    return rotate(x, *tables, p.pairing) if tables is not None and not p.norm_last else x
