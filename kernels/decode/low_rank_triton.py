"""Low-rank additions to a product (LoRA), each row with its own adapter, in two launches that CUDA graphs can capture.

Maths   t[m, p, :, k] = x[m, share k] A[a, p, :, share k]^T;   y[m, n] += (sum over k of t[m, p, :, k]) B[a, n]^T,
        a = adapters[m], p the part that column n lies in
Shapes  x (M, K) · A (S, P, R, K) · B (S, N, R) · y (M, N), dtype of x; R a power of two from 16 on. t is in fp32:
        (M, P, R, shares) for few rows, (shares, M, P, R) for many
Grid    up to FEW_ROWS rows: a program for each few rows, share of K and part, then for each ROWS rows and block of columns,
        without tensor cores; neighbours of one adapter read its A once. More rows: tiles of BLOCK_M rows, which multiply once
        for each adapter that their rows ask for
Launch  for few rows, numbers of adapters and factors are read before the previous kernel has ended (launch.py). Behind a
        product, a shrink runs beside it: x is there when the product lets it start. It waits for the product at its end, and
        reads x past the first-level cache (.cg), which may hold what lay there before
Limits  any M, K, N; shares of K are summed in the order in which they lie: the same bits each time
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lowq_kernels.decode.launch import launch_next, overlap, pdl, wait
from lowq_kernels.decode.low_rank_factors import LowRank, Shrunk

BLOCK_M, BLOCK_K = 16, 64
NONE = tl.constexpr(1 << 30)  # more than any adapter's number
# Max. rows without tensor cores: an 8B's layer takes 16 us of them at 16 rows and 36 at 64 (H200), tiles 150 and more.
FEW_ROWS = 128
ROWS = 2  # rows of a program that expands: 1 and 4 take 3 to 13% more
SHARES = 16  # shares of K: with one, a step of a few rows would have a few programs to read A
MOST_VALUES = 16384  # values of A in a program's registers
# The first tiles are of rows that step, whose adapters differ: so many tiles have TURNS programs, which take them by turns.
STEPPING, TURNS = 4, 4


@triton.jit
def _wait_first():
    """The first program waits for the previous kernel, so that the next one does, too."""
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        gdc_wait()


@triton.jit
def _shrink_rows_kernel(
    x_ptr, A_ptr, t_ptr, adapters_ptr, M, K, stride_xm, shares,
    P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    first, share, p = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2)
    offs_r, offs_k = tl.arange(0, R), share * SHARE + tl.arange(0, SHARE)
    mask = offs_k < K
    last = tl.load(adapters_ptr + first)  # w holds factors of this adapter
    rows = p * R * K + offs_r[:, None] * K + offs_k[None, :]
    w = tl.load(A_ptr + last.to(tl.int64) * P * R * K + rows, mask=mask[None, :] & (last > 0), other=0.0)
    launch_next(TRIGGER)
    wait(PDL and not BESIDE)
    for m in tl.range(first, min(first + ROWS, M)):
        a = tl.load(adapters_ptr + m)
        if (a > 0) & (a != last):
            w = tl.load(A_ptr + a.to(tl.int64) * P * R * K + rows, mask=mask[None, :], other=0.0)
            last = a
        x = tl.load(x_ptr + m * stride_xm + offs_k, mask=mask & (a > 0), other=0.0, cache_modifier=".cg")
        t = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(t_ptr + ((m * P + p) * R + offs_r) * shares + share, t)
    if PDL and BESIDE:
        _wait_first()


@triton.jit
def _expand_rows_kernel(
    t_ptr, B_ptr, y_ptr, adapters_ptr, blocks_ptr, M, N, stride_ym, shares,
    P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    block = blocks_ptr + tl.program_id(1) * 3
    first, end, p = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    offs_m, offs_n, offs_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, BLOCK_N), tl.arange(0, R)
    a = tl.load(adapters_ptr + offs_m, mask=offs_m < M, other=0)
    mask = (a > 0)[:, None] & (offs_n < end)[None, :]
    launch_next(TRIGGER)
    rows = a.to(tl.int64)[:, None] * N + offs_n[None, :]
    w = tl.load(B_ptr + rows[:, :, None] * R + offs_r[None, None, :], mask=mask[:, :, None], other=0.0)
    wait(PDL)
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0)  # under way with t
    offs_s = tl.arange(0, BLOCK_S)[None, None, :]
    t_ptrs = t_ptr + ((offs_m[:, None] * P + p) * R + offs_r[None, :])[:, :, None] * shares + offs_s
    t = tl.sum(tl.load(t_ptrs, mask=(a > 0)[:, None, None] & (offs_s < shares), other=0.0), 2)
    add = tl.sum(w.to(tl.float32) * t[:, None, :], 2)
    tl.store(y_ptrs, (y.to(tl.float32) + add).to(y.dtype), mask=mask)


@triton.jit
def _next(own, a):
    """The least adapter number above a that a row of the tile has, or NONE."""
    return tl.min(tl.where(own > a, own, NONE), 0)


@triton.jit
def _shrink_tiles_kernel(
    x_ptr, A_ptr, t_ptr, adapters_ptr, M, K, SHARE, stride_xm, shares,
    P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STEPPING: tl.constexpr, TURNS: tl.constexpr,
    BESIDE: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    pid, share, p, turn, turns = tl.program_id(0), tl.program_id(1), tl.program_id(2), 0, 1
    pid_m = pid - STEPPING * (TURNS - 1)
    if pid < STEPPING * TURNS:
        pid_m, turn, turns = pid // TURNS, pid % TURNS, TURNS
    offs_m, offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    own = tl.load(adapters_ptr + offs_m, mask=offs_m < M, other=0)
    launch_next(TRIGGER)
    wait(PDL and not BESIDE)
    acc, mine = tl.zeros((BLOCK_M, R), tl.float32), own < 0
    a = _next(own, 0)
    for _ in tl.range(turn):
        a = _next(own, a)
    while a < NONE:
        rows = own == a
        mine |= rows
        base = A_ptr + (a.to(tl.int64) * P + p) * R * K
        for k0 in range(share * SHARE, min(share * SHARE + SHARE, K), BLOCK_K):
            offs_k = k0 + tl.arange(0, BLOCK_K)
            mask_k = offs_k < K
            x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * stride_xm + offs_k[None, :]
            x = tl.load(x_ptrs, mask=rows[:, None] & mask_k[None, :], other=0.0, cache_modifier=".cg")
            w = tl.load(base + offs_r[None, :] * K + offs_k[:, None], mask=mask_k[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        for _ in tl.range(turns):
            a = _next(own, a)
    t_ptrs = t_ptr + ((share * M + offs_m)[:, None].to(tl.int64) * P + p) * R + offs_r[None, :]
    tl.store(t_ptrs, acc, mask=mine[:, None])
    if PDL and BESIDE:
        _wait_first()


@triton.jit
def _expand_tiles_kernel(
    t_ptr, B_ptr, y_ptr, adapters_ptr, blocks_ptr, M, N, stride_ym,
    SHARES: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    pid_m, block = tl.program_id(0), blocks_ptr + tl.program_id(1) * 3
    first, end, p = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    offs_m, offs_r = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, R)
    offs_n = first + tl.arange(0, BLOCK_N)
    mask_n = offs_n < end
    own = tl.load(adapters_ptr + offs_m, mask=offs_m < M, other=0)
    overlap(PDL, TRIGGER)
    a = _next(own, 0)
    if a < NONE:
        t = tl.zeros((BLOCK_M, R), tl.float32)
        for share in tl.static_range(SHARES):  # all of these loads are under way at once
            t_ptrs = t_ptr + ((share * M + offs_m)[:, None].to(tl.int64) * P + p) * R + offs_r[None, :]
            t += tl.load(t_ptrs, mask=(own > 0)[:, None], other=0.0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        while a < NONE:
            w_ptrs = B_ptr + (a.to(tl.int64) * N + offs_n[None, :]) * R + offs_r[:, None]
            w = tl.load(w_ptrs, mask=mask_n[None, :], other=0.0)
            acc = tl.dot(tl.where((own == a)[:, None], t, 0.0).to(w.dtype), w, acc, input_precision="ieee")
            a = _next(own, a)
        y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
        mask = mask_n[None, :] & (own > 0)[:, None]
        y = tl.load(y_ptrs, mask=mask, other=0.0)
        tl.store(y_ptrs, (y.to(tl.float32) + acc).to(y.dtype), mask=mask)


def expand_rows(y: torch.Tensor, shrunk: Shrunk, factors: LowRank, adapters: torch.Tensor) -> torch.Tensor:
    """y (M, N) of few rows with what adapters add, in place."""
    (M, N), (_, P, R, _) = y.shape, factors.A.shape
    _expand_rows_kernel[(triton.cdiv(M, ROWS), len(factors.blocks))](
        shrunk.t, factors.B, y, adapters, factors.blocks, M, N, y.stride(0), shrunk.shares, P=P, R=R, ROWS=ROWS,
        BLOCK_N=factors.BLOCK_N, BLOCK_S=triton.next_power_of_2(shrunk.shares), **pdl(y),
    )  # fmt: skip
    return y


def shares_of(K: int, R: int, M: int) -> tuple[int, int]:
    """Columns of K that a program multiplies by A, and how many such shares there are."""
    if M <= FEW_ROWS:
        share = min(max(BLOCK_K, triton.next_power_of_2(triton.cdiv(K, SHARES))), MOST_VALUES // R)
    else:
        shares = SHARES if M <= 512 else SHARES // 2 if M <= 2048 else SHARES // 4
        share = triton.cdiv(triton.cdiv(K, shares), BLOCK_K) * BLOCK_K
    return share, triton.cdiv(K, share)


def room(x: torch.Tensor, factors: LowRank) -> torch.Tensor:
    """Memory for t of x (M, K)."""
    (M, K), (_, P, R, _) = x.shape, factors.A.shape
    return torch.empty(M * P * R * shares_of(K, R, M)[1], dtype=torch.float32, device=x.device)


def shrink_rows(x: torch.Tensor, factors: LowRank, adapters: torch.Tensor, t: torch.Tensor | None = None) -> Shrunk:
    """Few rows of x (M, K) times A of each row's adapter.

    t: from `room`, taken before the product of x was launched, which is the kernel before this one. Then the shrink does not
    wait for that product, which does not let it start before x is there (launch.py).
    """
    (M, K), (_, P, R, _) = x.shape, factors.A.shape
    x, options = x if x.stride(1) == 1 else x.contiguous(), pdl(x) | {"BESIDE": t is not None}
    t, (share, shares) = room(x, factors) if t is None else t, shares_of(K, R, M)
    rows = 1 if M <= 64 else 2  # of a program: as two, 64 rows take 5.3 us instead of 4.7, 128 take 6.6 instead of 7.0
    _shrink_rows_kernel[(triton.cdiv(M, rows), shares, P)](
        x, factors.A, t, adapters, M, K, x.stride(0), shares, P=P, R=R, ROWS=rows, SHARE=share, **options
    )
    return Shrunk(t, shares)


def add_low_rank_rows(
    y: torch.Tensor, x: torch.Tensor, factors: LowRank, adapters: torch.Tensor, t: torch.Tensor | None = None
) -> torch.Tensor:
    """y (M, N) with what adapters add, in place. R is a power of two from 16 on.

    t: as of `shrink_rows`.
    """
    (M, K), N, (_, P, R, _) = x.shape, y.shape[1], factors.A.shape
    if not M:
        return y
    if M <= FEW_ROWS:
        return expand_rows(y, shrink_rows(x, factors, adapters, t), factors, adapters)
    x = x if x.stride(1) == 1 else x.contiguous()
    A, B, blocks, (share, shares) = factors.A, factors.B, factors.blocks, shares_of(K, R, M)
    sizes, tiles, options = {"P": P, "R": R}, triton.cdiv(M, BLOCK_M), pdl(x) | {"BESIDE": t is not None}
    t = room(x, factors) if t is None else t
    stepping = min(STEPPING, tiles)
    _shrink_tiles_kernel[(tiles + stepping * (TURNS - 1), shares, P)](
        x, A, t, adapters, M, K, share, x.stride(0), shares, **sizes, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, STEPPING=stepping,
        TURNS=TURNS, **options,
    )  # fmt: skip
    _expand_tiles_kernel[(tiles, len(blocks))](
        t, B, y, adapters, blocks, M, N, y.stride(0), SHARES=shares, **sizes, BLOCK_M=BLOCK_M, BLOCK_N=factors.BLOCK_N, **pdl(y)
    )
    return y
