"""warp32: words (N, T*32) int32, the layout of GemLite's CUDA GEMV kernels.

E = 32 // bits codes per word, most significant first, 32 codes apart: element i of word (t, lane) is
k = (t*E + i)*32 + lane, so a warp that reads 32 neighbouring words gets 32 neighbouring k for each i. Rows are padded
with code 0 to a multiple of 32*E; where K already is one, the words are GemLite's. 3 bits: E = 10, the low 2 bits unused.
scales, zeros (N, K // group_size).
Source: GemLite, branch stable_cuda_only.
"""

from __future__ import annotations

from lowq_packers.layouts import Layout, PackedWeight, meta_rows
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor

LANES = 32


def _pack(q: QuantizedTensor) -> PackedWeight:
    (N, K), E = q.shape, 32 // q.bits
    step = LANES * E
    T = -(-K // step)
    codes = torch.nn.functional.pad(q.W_q, (0, T * step - K)).reshape(N, T, E, LANES)
    words = torch.zeros(N, T, LANES, dtype=torch.int32, device=codes.device)
    for i in range(E):  # at most 32 passes over the words, each vectorised
        words |= codes[:, :, i].to(torch.int32) << (32 - q.bits * (i + 1))
    return PackedWeight(words.reshape(N, T * LANES), *meta_rows(q), q.scheme, N, K, "warp32", table=q.table)


def _unpack(p: PackedWeight) -> QuantizedTensor:
    s = p.scheme
    words = p.words.reshape(p.N, -1, 1, LANES)
    shifts = 32 - s.bits * (torch.arange(32 // s.bits, device=words.device) + 1)
    codes = (words >> shifts.reshape(1, 1, -1, 1)) & (s.levels - 1)
    W_q = codes.to(torch.uint8).reshape(p.N, -1)[:, : p.K].contiguous()
    return QuantizedTensor.of(s, W_q, p.scales, p.zeros, p.table)


WARP32 = Layout("warp32", _pack, _unpack)
