"""strided: words (ceil(K*bits/32), N) int32 row-major, the transpose of rowstream; scales, zeros (K // group_size, N).

Neighbouring threads read neighbouring n: coalesced for the Triton kernels. For 8, 4, 2 and 1 bits these are GemLite's
`W_q` words and GPTQ's `qweight`; for 3 bits, GPTQ's (32 codes in 3 words).
"""

from __future__ import annotations

from lowq_packers import bitstream
from lowq_packers.layouts import DISK, Layout, PackedWeight, pack, register, unpack
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor


def _transposed(p: PackedWeight, layout: str) -> PackedWeight:
    zeros = None if p.zeros is None else p.zeros.t().contiguous()
    return PackedWeight(p.words.t().contiguous(), p.scales.t().contiguous(), zeros, p.scheme, p.N, p.K, layout, table=p.table)


def _pack(q: QuantizedTensor) -> PackedWeight:
    return _from_rowstream(pack(q, DISK))


def _unpack(p: PackedWeight) -> QuantizedTensor:
    return unpack(_transposed(p, DISK))


def _from_rowstream(p: PackedWeight) -> PackedWeight:
    return _transposed(p, "strided")


def _take(p: PackedWeight, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    words, zeros = p.words[:, at].t(), None if p.zeros is None else p.zeros[:, at].t()
    return bitstream.unpack(words, p.scheme.bits, p.K), p.scales[:, at].t(), zeros


register(Layout("strided", _pack, _unpack, from_rowstream=_from_rowstream, rows=_take))
