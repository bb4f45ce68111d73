"""Low-rank additions to a product (LoRA), each row with its own adapter, in two launches that CUDA graphs can capture.

Maths   t[m, p, :, k] = x[m, share k] A[a, p, :, share k]^T;   y[m, n] += (sum over k of t[m, p, :, k]) B[a, n]^T,
        a = adapters[m], p the part that column n lies in
Shapes  x (M, K) · A (S, P, R, K) · B (S, N, R) · y (M, N), dtype of x; R a power of two from 16 on. t is in fp32:
        (M, P, R, shares) for few rows, (shares, M, P, R) for many
Grid    up to FEW_ROWS rows: a program for each few rows, share of K and part, then for each ROWS rows and block of columns,
        without tensor cores; neighbours of one adapter read its A once. More rows: tiles of BLOCK_M rows, which multiply once
        for each adapter that their rows ask for
Launch  for few rows, numbers of adapters and factors are read before the previous kernel has ended (launch.py)
Limits  any M, K, N; shares of K are summed in the order in which they lie: the same bits each time
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels.decode.launch import pdl
from lowq_kernels.decode.low_rank_factors import LowRank, Shrunk

BLOCK_M, BLOCK_K = 16, 64
# Max. rows without tensor cores: an 8B's layer takes 16 us of them at 16 rows and 36 at 64 (H200), tiles 150 and more.
FEW_ROWS = 128
ROWS = 2  # rows of a program that expands: 1 and 4 take 3 to 13% more
SHARES = 16  # shares of K: with one, a step of a few rows would have a few programs to read A
MOST_VALUES = 16384  # values of A in a program's registers


@triton.jit
def _shrink_rows_kernel(
    x_ptr, A_ptr, t_ptr, adapters_ptr, M, K, stride_xm, shares,
    P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    first, share, p = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    offs_r, offs_k = tl.arange(0, R), share * SHARE + tl.arange(0, SHARE)
    mask = offs_k < K
    last = tl.load(adapters_ptr + first)  # w holds factors of this adapter
    rows = p * R * K + offs_r[:, None] * K + offs_k[None, :]
    w = tl.load(A_ptr + last.to(tl.int64) * P * R * K + rows, mask=mask[None, :] & (last > 0), other=0.0)
    if TRIGGER:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    for m in tl.range(first, min(first + ROWS, M)):
        a = tl.load(adapters_ptr + m)
        if (a > 0) & (a != last):
            w = tl.load(A_ptr + a.to(tl.int64) * P * R * K + rows, mask=mask[None, :], other=0.0)
            last = a
        x = tl.load(x_ptr + m * stride_xm + offs_k, mask=mask & (a > 0), other=0.0)
        t = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(t_ptr + ((m * P + p) * R + offs_r) * shares + share, t)


@triton.jit
def _expand_rows_kernel(
    t_ptr, rms_ptr, B_ptr, y_ptr, adapters_ptr, blocks_ptr, M, N, stride_ym, shares,
    NORMED: tl.constexpr, P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    block = blocks_ptr + tl.program_id(1) * 3
    first, end, p = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    offs_m, offs_n, offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, BLOCK_N), tl.arange(0, R)
    a = tl.load(adapters_ptr + offs_m, mask=offs_m < M, other=0)
    mask = (a > 0)[:, None] & (offs_n < end)[None, :]
    if TRIGGER:
        gdc_launch_dependents()
    rows = a.to(tl.int64)[:, None] * N + offs_n[None, :]
    w = tl.load(B_ptr + rows[:, :, None] * R + offs_r[None, None, :], mask=mask[:, :, None], other=0.0)
    if PDL:
        gdc_wait()
    offs_s = tl.arange(0, BLOCK_S)[None, None, :]
    t_ptrs = t_ptr + ((offs_m[:, None] * P + p) * R + offs_r[None, :])[:, :, None] * shares + offs_s
    t = tl.sum(tl.load(t_ptrs, mask=(a > 0)[:, None, None] & (offs_s < shares), other=0.0), 2)
    if NORMED:
        t *= tl.load(rms_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    add = tl.sum(w.to(tl.float32) * t[:, None, :], 2)
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, (y.to(tl.float32) + add).to(y.dtype), mask=mask)


@triton.jit
def _shrink_tiles_kernel(
    x_ptr, A_ptr, t_ptr, adapters_ptr, M, K, SHARE, stride_xm, shares,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_m, share, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_m, offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    mask_m = offs_m < M
    own = tl.load(adapters_ptr + offs_m, mask=mask_m, other=0)
    acc = tl.zeros((BLOCK_M, R), tl.float32)
    for i in range(BLOCK_M):
        a = tl.sum(tl.where(tl.arange(0, BLOCK_M) == i, own, 0))
        before = tl.sum(((own == a) & (tl.arange(0, BLOCK_M) < i)).to(tl.int32))
        if (a > 0) & (before == 0):  # the first row that asks for it
            rows = mask_m & (own == a)
            base = A_ptr + (a.to(tl.int64) * P + p) * R * K
            for k0 in range(share * SHARE, min(share * SHARE + SHARE, K), BLOCK_K):
                offs_k = k0 + tl.arange(0, BLOCK_K)
                mask_k = offs_k < K
                x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :]
                x = tl.load(x_ptrs, mask=rows[:, None] & mask_k[None, :], other=0.0)
                w = tl.load(base + offs_r[None, :] * K + offs_k[:, None], mask=mask_k[:, None], other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
    t_ptrs = t_ptr + ((share * M + offs_m)[:, None].to(tl.int64) * P + p) * R + offs_r[None, :]
    tl.store(t_ptrs, acc, mask=mask_m[:, None])


@triton.jit
def _expand_tiles_kernel(
    t_ptr, B_ptr, y_ptr, adapters_ptr, blocks_ptr, M, N, stride_ym, shares,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_m, block = tl.program_id(0), blocks_ptr + tl.program_id(1) * 3
    first, end, p = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    offs_m, offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    offs_n = first + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < end
    own = tl.load(adapters_ptr + offs_m, mask=mask_m, other=0)
    if tl.max(own, 0) > 0:
        t = tl.zeros((BLOCK_M, R), tl.float32)
        for share in range(shares):
            t_ptrs = t_ptr + ((share * M + offs_m)[:, None].to(tl.int64) * P + p) * R + offs_r[None, :]
            t += tl.load(t_ptrs, mask=mask_m[:, None], other=0.0)
        y_ptrs = y_ptr + offs_m[:, None].to(tl.int64) * stride_ym + offs_n[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(BLOCK_M):
            a = tl.sum(tl.where(tl.arange(0, BLOCK_M) == i, own, 0))
            before = tl.sum(((own == a) & (tl.arange(0, BLOCK_M) < i)).to(tl.int32))
            if (a > 0) & (before == 0):
                w_ptrs = B_ptr + (a.to(tl.int64) * N + offs_n[None, :]) * R + offs_r[:, None]
                w = tl.load(w_ptrs, mask=mask_n[None, :], other=0.0)
                rows = tl.where((own == a)[:, None], t, 0.0)
                acc = tl.dot(rows.to(w.dtype), w, acc, input_precision="ieee")
        mask = mask_n[None, :] & (own > 0)[:, None]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        tl.store(y_ptrs, (y.to(tl.float32) + acc).to(y.dtype), mask=mask)


def expand_rows(y: torch.Tensor, shrunk: Shrunk, factors: LowRank, adapters: torch.Tensor) -> torch.Tensor:
    """y (M, N) of few rows with what adapters add, in place."""
    (M, N), (_, P, R, _), rms = y.shape, factors.A.shape, shrunk.rms
    _expand_rows_kernel[(triton.cdiv(M, ROWS), len(factors.blocks))](
        shrunk.t, rms, factors.B, y, adapters, factors.blocks, M, N, y.stride(0), shrunk.shares, NORMED=rms is not None, P=P,
        R=R, ROWS=ROWS, BLOCK_N=factors.BLOCK_N, BLOCK_S=triton.next_power_of_2(shrunk.shares), **pdl(y),
    )  # fmt: skip
    return y


def add_low_rank_rows(y: torch.Tensor, x: torch.Tensor, factors: LowRank, adapters: torch.Tensor) -> torch.Tensor:
    """y (M, N) with what adapters add, in place. R is a power of two from 16 on."""
    (M, K), N, (_, P, R, _) = x.shape, y.shape[1], factors.A.shape
    if not M:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    A, B, blocks, sizes = factors.A, factors.B, factors.blocks, {"P": P, "R": R}
    few, tiles = M <= FEW_ROWS, triton.cdiv(M, BLOCK_M)
    if few:
        share = min(max(BLOCK_K, triton.next_power_of_2(triton.cdiv(K, SHARES))), MOST_VALUES // R)
    else:
        share = triton.cdiv(triton.cdiv(K, SHARES), BLOCK_K) * BLOCK_K
    shares = triton.cdiv(K, share)
    t = torch.empty(M * P * R * shares, dtype=torch.float32, device=x.device)
    if few:
        rows = 1 if M <= 64 else 2  # of a program: as two, 64 rows take 5.3 us instead of 4.7, 128 take 6.6 instead of 7.0
        _shrink_rows_kernel[(triton.cdiv(M, rows), shares, P)](
            x, A, t, adapters, M, K, x.stride(0), shares, **sizes, ROWS=rows, SHARE=share, **pdl(x)
        )
        return expand_rows(y, Shrunk(t, shares), factors, adapters)
    _shrink_tiles_kernel[(tiles, shares, P)](
        x, A, t, adapters, M, K, share, x.stride(0), shares, **sizes, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K
    )
    _expand_tiles_kernel[(tiles, len(blocks))](
        t, B, y, adapters, blocks, M, N, y.stride(0), shares, **sizes, BLOCK_M=BLOCK_M, BLOCK_N=factors.BLOCK_N
    )
    return y
