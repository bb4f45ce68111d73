"""Latent attention of a pass's tokens over those before it, as a CUDA graph records it: lengths and tables are on the device.

    past    (tiles of tokens, heads, splits): the absorbed form over the paged latents, from a query's product with k_up to that
            of its sum with v_up, online in base 2. Tiles of texts without earlier tokens end at once
    merged  the sums of all splits of the earlier tokens, in their order

Limits  those of `latent_prompt`, which goes on from here with the pass's own tokens
Work    of a pair of tokens and a head 2 rank + rotated products, 3.4 times those with keys and values made (DeepSeek's sizes):
        as much work as making them at passes of 400 tokens of a text
Source  own; absorbed as in DeepSeek-V2 (arXiv:2405.04434)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv_triton import padded
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.latent_triton import _chunk, _rows, _tile, splits_for
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import CHUNK, Runs

SMEM = 128 << 10  # bytes of shared memory that the larger tiles of latent attention need
# Max. splits of the earlier tokens: each adds a product with v_up and a part of 512 bytes a token and head. 100 tokens after
# 8,000 of deepseek_v2 (20 layers, an H200) took 32.3 ms without splits, 13.8 with them.
MOST_SPLITS = 8
BLOCK_K = 32  # values of a head at once in products with k_up and v_up: 32 KB of shared memory at a rank of 512


@triton.jit
def tile_of(tiles_ptr, number, BLOCK_M: tl.constexpr, SIZE: tl.constexpr):
    """First and end of up to BLOCK_M tokens of a tile of SIZE, and the first of its text in this pass (`Runs.tiles`)."""
    tile, part = tiles_ptr + 4 * (number // (SIZE // BLOCK_M)), number % (SIZE // BLOCK_M) * BLOCK_M
    first = tl.load(tile) + part
    return first, tl.minimum(first + BLOCK_M, tl.load(tile + 1)), tl.load(tile + 2)


@triton.jit(do_not_specialize=["S"])
def _past_kernel(
    q_ptr, cache_ptr, rows_ptr, pos_ptr, table_ptr, tiles_ptr, k_up_ptr, v_up_ptr, past_ptr, weight_ptr, S, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Attention over the slots before a text's first token of this pass: past (tokens, HEADS, SPLITS, V), weight (tokens,
    HEADS, SPLITS): the logarithm of the sum of exponentials; both fp32, in base 2. S: the width of the table."""
    h, split = tl.program_id(1), tl.program_id(2)
    first, last, base = tile_of(tiles_ptr, tl.program_id(0), BLOCK_M, SIZE)
    if first >= last:
        return
    n = tl.load(pos_ptr + base)
    chunk = _chunk(n, SPLITS, BLOCK_N)
    begin = split * chunk
    if begin >= n:
        return
    end = tl.minimum(begin + chunk, n)
    offs_m, offs_k, offs_r = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    dims, here = tl.arange(0, BLOCK_RANK), offs_m < last
    of_head = offs_m.to(tl.int64) * HEADS + h
    own = q_ptr + of_head[:, None] * (NOPE + R)
    acc = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32)
    for n0 in range(0, NOPE, BLOCK_K):
        some = n0 + offs_k
        q = tl.load(own + some[None, :], mask=here[:, None] & (some < NOPE)[None, :], other=0.0)
        up = k_up_ptr + (h * NOPE + some)[:, None] * RANK + dims[None, :]
        up = tl.load(up, mask=(some < NOPE)[:, None] & (dims < RANK)[None, :], other=0.0)
        acc = tl.dot(q, up, acc, input_precision="ieee")
    absorbed = acc.to(q_ptr.dtype.element_ty)
    turned = tl.load(own + NOPE + offs_r[None, :], mask=here[:, None] & (offs_r < R)[None, :], other=0.0)
    text = tl.load(rows_ptr + base).to(tl.int64)
    acc, total = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        slots = n0 + tl.arange(0, BLOCK_N)
        there = slots < end
        entries = _rows(cache_ptr, table_ptr, text, slots, there, S, PAGE, RANK + R)
        held = tl.load(entries + dims[None, :], mask=there[:, None] & (dims < RANK)[None, :], other=0.0)
        keys = tl.load(entries + RANK + offs_r[None, :], mask=there[:, None] & (offs_r < R)[None, :], other=0.0)
        acc, top, total = _tile(acc, top, total, absorbed, turned, held, keys, there, scale)
    y = (acc / total[:, None]).to(q_ptr.dtype.element_ty)
    for v0 in range(0, V, BLOCK_K):
        some = v0 + offs_k
        up = v_up_ptr + (h * V + some)[None, :] * RANK + dims[:, None]
        up = tl.load(up, mask=(some < V)[None, :] & (dims < RANK)[:, None], other=0.0)
        part = tl.dot(y, up, input_precision="ieee")
        to = past_ptr + (of_head * SPLITS + split)[:, None] * V + some[None, :]
        tl.store(to, part, mask=here[:, None] & (some < V)[None, :])
    tl.store(weight_ptr + of_head * SPLITS + split, top + tl.log2(total), mask=here)


@triton.jit
def _joined(acc, total, top, part, weight, score):
    """Sums, their weights and highest scores in base 2, and those of one more split. total, top, weight, score: (n, 1)."""
    higher = tl.maximum(top, score)
    fade, share = tl.exp2(top - higher), tl.exp2(score - higher)
    return acc * fade + part * share, total * fade + weight * share, higher


@triton.jit
def merged(
    past_ptr, weight_ptr, n, of_rows, offs_v, here, V: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What `past` left of n earlier tokens for rows (BLOCK_M, 1) of tokens and heads: (sum, highest score, its weight), from
    which attention goes on. offs_v (1, BLOCK_V), here (BLOCK_M, 1)."""
    acc, total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32), tl.zeros((BLOCK_M, 1), tl.float32)
    top = tl.full((BLOCK_M, 1), -1.0e30, tl.float32)
    live = tl.cdiv(n, tl.maximum(_chunk(n, SPLITS, BLOCK_N), 1))
    for split in range(live):
        of_split = of_rows * SPLITS + split
        part = tl.load(past_ptr + of_split * V + offs_v, mask=here & (offs_v < V), other=0.0)
        weight = tl.load(weight_ptr + of_split, mask=here, other=-1.0e30)
        acc, total, top = _joined(acc, total, top, part, 1.0, weight)
    return acc, tl.max(top, 1), tl.sum(total, 1)


def past_of(q: torch.Tensor, cache: torch.Tensor, p: Packed, runs: Runs, f: Latent) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a pass's rotated queries over the tokens before it, and its weight, as the kernel leaves them."""
    small = q.dtype == torch.float32 or gpu.here(q.device.index).smem_block < SMEM
    BLOCK_M, stages = (16, 1) if small else (CHUNK, 2)
    splits = min(MOST_SPLITS, splits_for(triton.cdiv(q.shape[0], BLOCK_M) * f.heads))
    past = torch.empty(q.shape[0], f.heads, splits, f.v_dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(q.shape[0], f.heads, splits, dtype=torch.float32, device=q.device)
    _past_kernel[(runs.tiles.shape[0] * (CHUNK // BLOCK_M), f.heads, splits)](
        q, cache, p.rows, p.pos, p.table, runs.tiles, f.k_up, f.v_up, past, weight, p.table.shape[1], f.scale * LOG2E,
        HEADS=f.heads, NOPE=f.nope, R=f.rotated, RANK=f.rank, V=f.v_dim, PAGE=cache.shape[2], SPLITS=splits, SIZE=CHUNK,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_K, BLOCK_K=BLOCK_K, BLOCK_R=padded(f.rotated), BLOCK_RANK=padded(f.rank), num_warps=8,
        num_stages=stages,
    )  # fmt: skip
    return past, weight
