"""rowstream: words (N, ceil(K*bits/32)) int32, a little-endian bit stream of codes along K. The on-disk layout.

The same words as compressed-tensors `weight_packed`, Humming `weight` and MLX `weight`. scales, zeros (N, K // group_size).
"""

from __future__ import annotations

from lowq_packers import bitstream
from lowq_packers.layouts import Layout, PackedWeight, meta_rows, register
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


def _pack(q: QuantizedTensor) -> PackedWeight:
    return PackedWeight(bitstream.pack(q.W_q, q.bits), *meta_rows(q), q.scheme, *q.shape, layout="rowstream", table=q.table)


def _unpack(p: PackedWeight) -> QuantizedTensor:
    s = p.scheme
    return QuantizedTensor.of(s, bitstream.unpack(p.words, s.bits, p.K), p.scales, p.zeros, p.table)


def _take(p: PackedWeight, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return bitstream.unpack(p.words[at], p.scheme.bits, p.K), p.scales[at], None if p.zeros is None else p.zeros[at]


def expected_shapes(scheme: Scheme, N: int, K: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of `words` and of `scales` (and zeros) for an (N, K) weight."""
    return (N, bitstream.words_per_row(K, scheme.bits)), (N, scheme.groups(K))


register(Layout("rowstream", _pack, _unpack, shapes=expected_shapes, rows=_take))
