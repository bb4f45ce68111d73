"""Partial sums across programs, deterministic and in one launch: the last program of a tile adds all of them in order.

Each program of a tile writes its fp32 partial to a workspace and increments the tile's counter. The last one reads every
partial back (they are in the L2 cache), adds them in the order of their slots, so that the result does not depend on which
program was last, writes y and resets the counter to 0 (counters.py). No zero-fill launch, no atomics on y.
"""

import torch
import triton
import triton.language as tl

from lowq_kernels.counters import counters


def split_scratch(y: torch.Tensor, tiles: int, splits: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 slots for `splits` partials of `size` numbers a tile, a counter a tile); y (M, N) for both without splits."""
    if splits == 1:
        return y, y  # neither is read or written
    return torch.empty(tiles * splits * size, dtype=torch.float32, device=y.device), counters(tiles, y.device)


@triton.jit
def arrived_last(counter_ptr, parties):
    """Announce this program's partial; True in the last of `parties` to do so, which then may read all of them."""
    tl.debug_barrier()  # every thread's stores happen before the release below
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == parties - 1
    if last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def put_partial(acc, slot_ptr, offs_m, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write acc (BLOCK_M, BLOCK_N) into its slot; rows past M are skipped."""
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(slot_ptr + offs, acc, mask=(offs_m < M)[:, None])


@triton.jit
def get_partial(slot_ptr, offs_m, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Read a slot back, past the first-level cache, which other multiprocessors' writes do not reach."""
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return tl.load(slot_ptr + offs, mask=(offs_m < M)[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def store_tile(acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, BIAS: tl.constexpr):
    """y[offs_m, offs_n] = acc (+ bias), acc (BLOCK_M, BLOCK_N) fp32, rounded once."""
    mask_n = offs_n < N
    if BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & mask_n[None, :])


@triton.jit
def store_split_tile(
    acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, tile, split, partials_ptr, counters_ptr,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """`store_tile` of the sum of a tile's SPLIT_K partial sums, by the last program to arrive; acc: of program `split`."""
    if SPLIT_K == 1:
        store_tile(acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, BIAS)
    else:
        slots = partials_ptr + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
        put_partial(acc, slots + split * (BLOCK_M * BLOCK_N), offs_m, M, BLOCK_M, BLOCK_N)
        if arrived_last(counters_ptr + tile, SPLIT_K):
            total = get_partial(slots, offs_m, M, BLOCK_M, BLOCK_N)
            for s in tl.static_range(1, SPLIT_K):
                total += get_partial(slots + s * (BLOCK_M * BLOCK_N), offs_m, M, BLOCK_M, BLOCK_N)
            store_tile(total, bias_ptr, y_ptr, M, N, offs_m, offs_n, BIAS)
