"""e4m3: words (N, K) float8_e4m3fn, scales fp32 of blocks (ceil(N / block_rows), ceil(K / group_size)): fp8 as in files."""

from __future__ import annotations

from lowq_packers.layouts import ALONE, Layout, PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import E4M3, Scheme, scale_shape


def _pack(q: QuantizedTensor) -> PackedWeight:
    return PackedWeight(q.W_q.view(torch.float8_e4m3fn), q.scales, None, q.scheme, *q.shape, E4M3)


def _unpack(p: PackedWeight) -> QuantizedTensor:
    return QuantizedTensor.of(p.scheme, p.words.view(torch.uint8), p.scales, None)


def _why_not(scheme: Scheme, N: int, K: int) -> str | None:
    return None if scheme.table == E4M3 else "it holds 8-bit floats"


def _shapes(s: Scheme, N: int, K: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (N, K), scale_shape((N, K), s.block)


ALONE[E4M3] = Layout(E4M3, _pack, _unpack, _why_not, shapes=_shapes, words="float8_e4m3fn")
