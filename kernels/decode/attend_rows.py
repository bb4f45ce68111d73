"""attend_rows: attention of rows of which several are of one sequence, a token and drafts of the next ones, over a paged cache.

All keys and values are written before any row reads them: a kernel of its own (`prompt`), then each row as a step that writes
nothing. Over a cache in few bits it is a prompt's attention, a row a tile.
"""

from dataclasses import replace

import torch
import triton

from lowq_kernels.decode import attend as steps
from lowq_kernels.decode import prompt
from lowq_kernels.decode.kv import PLAIN, Cache, kind_of
from lowq_kernels.decode.kv_triton import padded
from lowq_kernels.decode.reference import Heads, Packed


def attend_rows(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    pos: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    table: torch.Tensor,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.attend` of rows with a `table`, which may name the same blocks for several."""
    M = qkv.shape[0]
    rows = torch.arange(M, dtype=torch.int32, device=qkv.device)
    if kind_of(k_cache) != PLAIN:
        packed = Packed(table, rows, pos, torch.stack((rows, rows + 1), 1))
        return prompt.attend_packed(qkv, k_cache, v_cache, packed, cos, sin, h)
    if not h.writes:
        return steps.attend(qkv, k_cache, v_cache, pos, cos, sin, h, table, order)
    q = torch.empty(M, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norms = (h.q_norm, h.q_norm if h.k_norm is None else h.k_norm)
    prompt._place_kernel[(M, triton.cdiv(h.HQ + 2 * h.HKV, prompt.HEADS_AT_ONCE))](
        qkv, k_cache, v_cache, rows, pos, table, cos, sin, *norms, q, 1 << 30, 0, k_cache.shape[2], table.shape[1], h.eps,
        HQ=h.HQ, HKV=h.HKV, D=h.D, R=cos.shape[1], NORM=h.q_norm is not None, PAGE=k_cache.shape[2],
        BLOCK_H=prompt.HEADS_AT_ONCE, BLOCK_D=padded(h.D), num_warps=4,
    )  # fmt: skip
    plain = replace(h, q_norm=None, k_norm=None, writes=False)
    return steps.attend(q, k_cache, v_cache, pos, cos[:, :0], sin[:, :0], plain, table, order)
