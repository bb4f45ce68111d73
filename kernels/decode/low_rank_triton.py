"""Low-rank additions to a product (LoRA), each row with its own adapter, in two launches that CUDA graphs can capture.

Maths   t[m, p, :, k] = x[m, share k] A[a, p, :, share k]^T;   y[m, n] += (sum over k of t[m, p, :, k]) B[a, n]^T,
        a = adapters[m], p the part that column n lies in
Shapes  x (M, K) · A (S, P, R, K) · t (M, P, R, shares) fp32 · B (S, N, R) · y (M, N), dtype of x; R a power of two from 16 on
Grid    (tiles of BLOCK_M rows, shares of K, P * FORKS) and (tiles, blocks of columns, FORKS): program f of a tile's FORKS takes
        the adapters f, f + FORKS, ... of those that its rows ask for, so factors are read once a tile; adapter 0 costs nothing
Launch  in steps, factors are read before the previous kernel has ended (gdc_wait)
Limits  any M, K, N; shares of K are summed in the order in which they lie: the same bits each time
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels.decode.launch import pdl
from lowq_kernels.decode.low_rank import LowRank

FEW_ROWS = 128  # max. rows of a step; more rows are a prompt's, which few adapters share
STEP = {"BLOCK_M": 16, "FORKS": 8, "num_warps": 4}
PROMPT = {"BLOCK_M": 64, "FORKS": 2, "num_warps": 4}
STEP_SHARES, PROMPT_SHARES = 32, 4  # shares of K at most: a step has few tiles to fill a GPU, a prompt's sums are read again
MOST_VALUES = 16384  # values of x or A in a program's registers


@triton.jit
def _adapters_of(adapters_ptr, offs_m, M, BLOCK_M: tl.constexpr):
    """The adapter of each row of a tile, where it stands first and as which of the tile's, and how many the tile has."""
    own = tl.load(adapters_ptr + offs_m, mask=offs_m < M, other=0)
    i = tl.arange(0, BLOCK_M)
    before = tl.sum(((own[:, None] == own[None, :]) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    first = ((before == 0) & (own > 0)).to(tl.int32)
    return own, first, tl.cumsum(first, 0) - first, tl.sum(first, 0)


@triton.jit
def _shrink_kernel(
    x_ptr, A_ptr, t_ptr, adapters_ptr, M, K, SHARE, stride_xm, shares,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, FORKS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    share, p, fork = tl.program_id(1), tl.program_id(2) % P, tl.program_id(2) // P
    offs_m, offs_r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    own, first, number, count = _adapters_of(adapters_ptr, offs_m, M, BLOCK_M)
    if TRIGGER:
        gdc_launch_dependents()
    if PDL and not STEP:
        gdc_wait()
    for j in range(fork, count, FORKS):
        a = tl.sum(tl.where((first > 0) & (number == j), own, 0), 0)
        rows, base = own == a, A_ptr + (a.to(tl.int64) * P + p) * R * K
        acc = tl.zeros((BLOCK_M, R), tl.float32)
        for k0 in range(share * SHARE, min(share * SHARE + SHARE, K), BLOCK_K):
            offs_k = k0 + tl.arange(0, BLOCK_K)
            mask_k = offs_k < K
            w = tl.load(base + offs_r[:, None] * K + offs_k[None, :], mask=mask_k[None, :], other=0.0)
            if PDL and STEP:
                gdc_wait()
            x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :]
            x = tl.load(x_ptrs, mask=rows[:, None] & mask_k[None, :], other=0.0)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        t_ptrs = t_ptr + ((offs_m[:, None].to(tl.int64) * P + p) * R + offs_r[None, :]) * shares + share
        tl.store(t_ptrs, acc, mask=rows[:, None])
    if PDL and STEP:
        gdc_wait()  # also without an adapter: what comes next counts on all that ran before


@triton.jit
def _expand_kernel(
    t_ptr, B_ptr, y_ptr, adapters_ptr, blocks_ptr, M, N, stride_ym, shares,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    FORKS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    block = blocks_ptr + tl.program_id(1) * 3
    start, end, p = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    offs_m, offs_n, offs_r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N), tl.arange(0, R)
    mask_n, offs_s = offs_n < end, tl.arange(0, BLOCK_S)[None, None, :]
    own, first, number, count = _adapters_of(adapters_ptr, offs_m, M, BLOCK_M)
    if TRIGGER:
        gdc_launch_dependents()
    for j in range(tl.program_id(2), count, FORKS):
        a = tl.sum(tl.where((first > 0) & (number == j), own, 0), 0)
        rows = own == a
        w_ptrs = B_ptr + (a.to(tl.int64) * N + offs_n[:, None]) * R + offs_r[None, :]
        w = tl.load(w_ptrs, mask=mask_n[:, None], other=0.0)
        if PDL:
            gdc_wait()
        t_ptrs = t_ptr + ((offs_m[:, None].to(tl.int64) * P + p) * R + offs_r[None, :])[:, :, None] * shares + offs_s
        t = tl.sum(tl.load(t_ptrs, mask=rows[:, None, None] & (offs_s < shares), other=0.0), 2)
        y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
        mask = rows[:, None] & mask_n[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        add = tl.dot(t.to(w.dtype), tl.trans(w), input_precision="ieee")
        tl.store(y_ptrs, (y.to(tl.float32) + add).to(y.dtype), mask=mask)
    if PDL:
        gdc_wait()


def add_low_rank_rows(y: torch.Tensor, x: torch.Tensor, factors: LowRank, adapters: torch.Tensor) -> torch.Tensor:
    """y (M, N) with what adapters add, in place. R is a power of two from 16 on."""
    (M, K), N, (_, P, R, _) = x.shape, y.shape[1], factors.A.shape
    if not M:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    step = M <= FEW_ROWS
    how = STEP if step else PROMPT
    wide = MOST_VALUES // max(R, how["BLOCK_M"])
    if step:
        share = block = max(16, min(triton.next_power_of_2(triton.cdiv(K, STEP_SHARES)), wide))
    else:
        block = max(16, min(128, wide))
        share = triton.cdiv(triton.cdiv(K, PROMPT_SHARES), block) * block
    shares, tiles = triton.cdiv(K, share), triton.cdiv(M, how["BLOCK_M"])
    t = torch.empty((M, P, R, shares), dtype=torch.float32, device=x.device)
    sizes = {"P": P, "R": R, **how, **pdl(x)}
    _shrink_kernel[(tiles, shares, P * how["FORKS"])](
        x, factors.A, t, adapters, M, K, share, x.stride(0), shares, BLOCK_K=block, STEP=step, **sizes
    )
    _expand_kernel[(tiles, len(factors.blocks), how["FORKS"])](
        t, factors.B, y, adapters, factors.blocks, M, N, y.stride(0), shares, BLOCK_N=factors.BLOCK_N,
        BLOCK_S=triton.next_power_of_2(shares), **sizes,
    )  # fmt: skip
    return y
