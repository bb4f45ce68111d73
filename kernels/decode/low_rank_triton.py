"""Low-rank additions to a product (LoRA), each row with its own adapter, in two launches that CUDA graphs can capture.

Maths   t[k, m] = x[m, part k] A[a, :, part k]^T;   y[m] += (sum over k of t[k, m]) B[a]^T,   a = adapters[m]
Shapes  x (M, K) · A (S, R, K) · t (SPLIT_K, M, R) fp32 · B (S, N, R) · y (M, N), dtype of x; R a power of two from 16 on
Grid    (cdiv(M, BLOCK_M), SPLIT_K) and (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)): a tile multiplies once for each adapter that its
        rows ask for, so a prompt's tile once; adapter 0 costs nothing
Limits  any M, K, N; parts of K are summed in the order in which they lie: the same bits each time
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64
PARTS = 16  # max. parts of K: without a split, a step of a few rows would have a single program to read A
LEAST_RANK = 16  # the smallest depth of a tensor core's product


@triton.jit
def _shrink_kernel(
    x_ptr, A_ptr, t_ptr, adapters_ptr, M, K, PART, stride_xm,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_m, part = tl.program_id(0), tl.program_id(1)
    offs_m, offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    mask_m = offs_m < M
    own = tl.load(adapters_ptr + offs_m, mask=mask_m, other=0)
    acc = tl.zeros((BLOCK_M, R), tl.float32)
    for i in range(BLOCK_M):
        a = tl.sum(tl.where(tl.arange(0, BLOCK_M) == i, own, 0))
        before = tl.sum(((own == a) & (tl.arange(0, BLOCK_M) < i)).to(tl.int32))
        if (a > 0) & (before == 0):  # the first row that asks for it
            rows = mask_m & (own == a)
            base = A_ptr + a.to(tl.int64) * R * K
            for k0 in range(part * PART, min(part * PART + PART, K), BLOCK_K):
                offs_k = k0 + tl.arange(0, BLOCK_K)
                mask_k = (offs_k < K) & (offs_k < part * PART + PART)
                x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :]
                x = tl.load(x_ptrs, mask=rows[:, None] & mask_k[None, :], other=0.0)
                w = tl.load(base + offs_r[None, :] * K + offs_k[:, None], mask=mask_k[:, None], other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
    t_ptrs = t_ptr + (part * M + offs_m)[:, None].to(tl.int64) * R + offs_r[None, :]
    tl.store(t_ptrs, acc, mask=mask_m[:, None])


@triton.jit
def _expand_kernel(
    t_ptr, B_ptr, y_ptr, adapters_ptr, M, N, SPLIT_K, stride_ym,
    R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    offs_m, offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    own = tl.load(adapters_ptr + offs_m, mask=mask_m, other=0)
    if tl.max(own, 0) > 0:
        t = tl.zeros((BLOCK_M, R), tl.float32)
        for part in range(SPLIT_K):
            t_ptrs = t_ptr + (part * M + offs_m)[:, None].to(tl.int64) * R + offs_r[None, :]
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
        mask = mask_m[:, None] & mask_n[None, :] & (own > 0)[:, None]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        tl.store(y_ptrs, (y.to(tl.float32) + acc).to(y.dtype), mask=mask)


def add_low_rank_rows(
    y: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, adapters: torch.Tensor
) -> torch.Tensor:
    """y (M, N) with what adapters add, in place. R is a power of two, at least LEAST_RANK."""
    (M, K), N, R = x.shape, y.shape[1], A.shape[1]
    if not M:
        return y
    part = triton.cdiv(triton.cdiv(K, PARTS), BLOCK_K) * BLOCK_K
    parts = triton.cdiv(K, part)
    x = x if x.stride(1) == 1 else x.contiguous()
    t = torch.empty((parts, M, R), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(M, BLOCK_M)
    _shrink_kernel[(tiles, parts)](x, A, t, adapters, M, K, part, x.stride(0), R=R, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K)
    _expand_kernel[(tiles, triton.cdiv(N, BLOCK_N))](
        t, B, y, adapters, M, N, parts, y.stride(0), R=R, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N
    )
    return y
