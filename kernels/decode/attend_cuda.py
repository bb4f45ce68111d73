"""cuda/attend and cuda/attend_rows: attend.cu, for the head shapes of today's models on Hopper and later.

Launch  few sequences: a cluster of 8 blocks of 4 warps per key head. Long caches: enough blocks of 8 warps per key head to
        fill the GPU. Many heads: one block of 8 warps per key head, two where the sequence is long
Speed   microseconds on an H100 within a chain of kernels (in parentheses Triton's kernel), 8 key heads of 128 dims.
        One sequence: 100 slots 3.2 (5.6), 2,000 slots 6.3 (10.3), 32,000 slots 46 (73), in fp8 27 (83), in 4 bits 17 (94).
        Eight sequences of 4,400 slots: 50 (56), in fp8 29 (68), in 4 bits 18 (90). 64 sequences of 500 slots, paged:
        48 (52). 64 sequences of 59 to 3,390 slots, paged: 74; with the longest sequences first: 62
        On an H200, 500 and 32,000 slots: 12 queries a key head 3.7 (13.9), 47 (78); 4 key heads of 256 dims 3.4 (10.8), 40
        (101); 2 key heads of 512 dims 4.8 (19.5), 87 (310)
"""

import ctypes
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.cuda.driver import MOST_BLOCKS, SYSTEM, Kernel
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode import launch
from lowq_kernels.decode.attend import LONG, AttendCall, usual
from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv import PLAIN, SHORTER, Cache, Coded, kind_of, slot_bytes
from lowq_kernels.decode.kv_triton import NUMBERS, numbers
from lowq_kernels.decode.reference import MOST_DRAFTS, SHARED, Groups, Heads, Places
from lowq_kernels.dispatch.registry import Config, register

PARAMETERS = (*(ctypes.c_void_p,) * 16, *(ctypes.c_int32,) * 4, *(ctypes.c_float,) * 3)
TILES = {"16": 2, "fp8": 3, "4": 4}
DIMS = (64, 128, 256, 512)  # of a head; over codes the first two
# Layouts of qkv, added up: each head of q is followed by a gate of its output; values are normed; they are keys before the norm
GATED, V_NORMED, V_IS_K = 1, 2, 4
NARROW, WIDE = 4, 8  # warps per block
CLUSTER = 8  # blocks per cluster: the size that every GPU with clusters allows
# Max. groups of queries, over all sequences, that are split over clusters or over blocks that fill the GPU; of wider heads than
# 128 dims as many as have the same bytes: one block of them fits an SM
MOST_HEADS = 32
MOST_QUERIES, MOST_GROUPS = 8, 4  # max. queries of a group (one tile of mma), groups of a key head
MOST_WIDE_QUERIES = 4  # of heads of 512 dims, whose sums would not fit next to the tiles
FEW_WAVES = 3  # up to this many heads per SM the longest sequences would run alone at the end
SPLITS = 2  # max. blocks per head where heads alone fill the GPU; 512 idle blocks cost 1 us
# With the longest sequences first: an SM runs two blocks at once from more than TWO_WAVES heads per SM on, and a head is
# then split over at most ORDERED_SPLITS blocks.
TWO_WAVES, ORDERED_SPLITS = 2, 4
# Min. tiles per block of heads of 256 and 512 dims, of more than MOST_HEADS and fewer than the GPU has SMs. us with 4 (32) on
# an H200, eight sequences of 500 slots: 4 key heads of 256 dims 9.3 (12.9), 2 of 512 dims 16.3 (38.2).
WIDE_LEAST = 4
# Min. tiles (16 slots) per block when heads alone fill the GPU: with few waves sequences are split from 1,024 slots on, with
# many waves from 6,144 on.
LEAST, LEAST_MANY = 32, 192
# Rows of a sequence: each block of rows reads all slots, Triton's kernel reads them once. Four blocks are faster at any length,
# eight up to so many slots (8B, 16 rows: 1.92 ms a step after 512 tokens, Triton's 2.10; after 3,000 tokens 2.31 and 2.25).
FEW_BLOCKS, SHORT = 4, 2048
MOST_CLUSTERS = 16  # max. blocks of rows, over all key heads, that are split over clusters
STATIC = 8 << 10  # max. bytes of shared memory that attend.cu declares statically: 8 warps, 8 queries of 128 dims, codes


def _ring(D: int, warps: int, kv: str, stages: int) -> int:
    """Bytes of shared memory per block: each warp prefetches `stages` tiles of 16 slots of k and of v. At the end the warp's
    sums of 8 queries, which are smaller, overwrite them."""
    return stages * warps * 2 * 16 * slot_bytes(kv, D, torch.float16)


def _declared(D: int, G: int, warps: int, kv: str) -> int:
    """Bytes of shared memory that attend.cu declares without a cluster, at most 32 too many."""
    return 8 * warps * G + (0 if kv == PLAIN else 512 * warps) + 2 * G * (D + 8) + 2 * slot_bytes(kv, D, torch.float16) + 40


def groups(G: int, D: int) -> int | None:
    """Groups that G queries of a key head are cut into, of as many queries each; None: more than MOST_GROUPS."""
    most = MOST_WIDE_QUERIES if D > 256 else MOST_QUERIES
    return next((n for n in range(1, MOST_GROUPS + 1) if G % n == 0 and G // n <= most), None)


class Shape(NamedTuple):
    """The launch of a call: warps per block, blocks per cluster, tiles that a warp prefetches, blocks per group, min. tiles per
    block, bytes of dynamic shared memory."""

    warps: int
    cluster: int
    stages: int
    blocks: int
    least: int
    shared: int


def shape(heads: int, S: int, D: int, G: int, kv: str, on: gpu.Gpu, ordered: bool = False) -> Shape:
    """The launch for `heads` groups over all sequences, each of G queries and S slots; ordered: longest sequences first.

    A block of 8 warps asks for more than half of an SM's shared memory, so that an SM holds only one. Otherwise the next
    layer's blocks, which start while this layer still runs, would double up on idle SMs and share their bandwidth (4 bits,
    128,000 slots: 117 us instead of 65). Decoding codes of many heads is bound by arithmetic, so there several blocks share
    an SM (64 sequences of 500 slots: 30 us instead of 40).
    """
    few, tiles, narrow = heads * max(1, D // 128) <= MOST_HEADS, TILES[kv], TILES[kv]
    if D > 128:  # 128 KB of tiles a block
        tiles, narrow = 1, 512 // D
    wide = _ring(D, WIDE, kv, tiles) + STATIC <= on.smem_block
    if few and not ((wide or D > 256) and S >= LONG):
        return Shape(NARROW, CLUSTER, narrow, CLUSTER, 1, _ring(D, NARROW, kv, narrow))
    if ordered and wide and kv == PLAIN and heads > TWO_WAVES * on.sms:
        return Shape(WIDE, 1, 1, ORDERED_SPLITS, LEAST, _ring(D, WIDE, kv, 1))
    waves = heads <= FEW_WAVES * on.sms
    blocks, least = (SPLITS, LEAST if waves else LEAST_MANY) if heads > on.sms else (on.sms // heads, 1 if few else LEAST)
    if D > 128 and not few and heads <= on.sms:
        least = WIDE_LEAST
    if wide and (waves or kv == PLAIN):
        alone = on.smem_sm // 2 + 1 - _declared(D, G, WIDE, kv) - SYSTEM
        return Shape(WIDE, 1, tiles, blocks, least, max(_ring(D, WIDE, kv, tiles), alone))
    return Shape(NARROW, 1, narrow, blocks, least, _ring(D, NARROW, kv, narrow))


def rows_shape(heads: int, S: int, D: int, Q: int, on: gpu.Gpu) -> Shape:
    """The launch for `heads` blocks of rows of one sequence over all key heads, each of Q queries.

    Clusters pay for fewer of them than in `shape`, since each block also prepares the rows before its own (8B, 8 rows after 512
    tokens: a step takes 1.82 ms with 32 clusters, 1.67 ms with blocks that fill the GPU).
    """
    cut = shape(heads, S, D, Q, PLAIN, on)
    if cut.cluster == 1 or heads <= MOST_CLUSTERS or _ring(D, WIDE, PLAIN, TILES[PLAIN]) + STATIC > on.smem_block:
        return cut
    return shape(heads, LONG, D, Q, PLAIN, on)


def at_once(cut: Shape, D: int, G: int, kv: str, on: gpu.Gpu) -> int:
    """Blocks that one SM runs at once, for a shape without a cluster."""
    return min(16 // cut.warps, on.smem_sm // (cut.shared + _declared(D, G, cut.warps, kv) + SYSTEM))


def _refuse(call: AttendCall) -> str | None:
    if why := usual(replace(call, beyond=tuple(b for b in call.beyond if b != SHARED))):
        return why
    share = groups(call.HQ // call.HKV, call.D)
    turned = call.R and call.R % 64 == 0 and (call.R <= 128 or call.R == call.D)
    if call.D not in (DIMS if call.kv == PLAIN else DIMS[:2]) or not turned or share is None:
        found = f"D={call.D}, R={call.R}, {call.HQ // call.HKV} queries a key head, caches in {call.kv}"
        return f"takes heads of {DIMS} with up to {MOST_GROUPS} groups of {MOST_QUERIES} queries, not {found}"
    queries = call.HQ // call.HKV // share
    if call.norm not in (None, call.dtype, torch.float32):
        return f"takes norms of {call.dtype} or fp32"
    if call.block and (call.block < 16 or call.block & (call.block - 1)):
        return f"takes blocks of a power of two from 16 slots up, not {call.block}"
    on = gpu.here()
    if call.kv != PLAIN:  # for any number of heads: Triton's kernel takes 3 times as long in fp8, 8 times in 4 bits
        return f"takes caches in {call.kv} of a multiple of 16 slots, not {call.S}" if call.S % 16 else None
    heads = call.M * call.HKV * share
    cut = shape(heads, call.S, call.D, queries, call.kv, on)
    # 64 sequences of 128 slots: 21 us here, 17 in Triton; of 400 slots: 35 and 36. Of 500 slots of 256 dims: 37 and 55
    short = heads > on.sms and call.S < LONG and call.D != 256
    # Two groups of 6 queries read their keys twice: 64 sequences of 500 slots take 69 us, 41 in Triton. Three groups of 3
    # queries: 8 sequences of 4,400 slots take 47, 30 in Triton
    again = share > 1 and (heads > on.sms or (share > 2 and heads > MOST_HEADS and call.S >= LONG))
    alone = (cut.warps, cut.cluster) == (NARROW, 1) and at_once(cut, call.D, queries, call.kv, on) < 2
    if short or again or (alone and not (call.D > 256 and heads <= on.sms)):
        return f"{heads} key heads over all sequences: Triton's kernel is as fast"
    declared = _declared(call.D, queries, cut.warps, call.kv) + (cut.cluster > 1) * 6 * call.D * queries
    if call.D > 128 and cut.shared + declared > on.smem_block:
        return f"takes heads of {call.D} where a block has {cut.shared + declared} bytes of shared memory"
    return None


def expression(
    T: int, D: int, R: int, G: int, norm: int, cut: Shape, page: int = 0, kv: int = 0, share: int = 1, writes: bool = True,
    layout: int = 0, rows: int = 0,
) -> str:  # fmt: skip
    """The template instance of attend.cu. G: queries of a group. norm: 0 none, 1 weights of the dtype of x, 2 fp32. page: slots
    of a block, or 0. share: groups of a key head. layout: of qkv. rows: rows of one sequence that a block takes, or 0."""
    more = "" if (share, writes, layout, rows) == (1, True, 0, 0) else f", {share}, {int(writes)}"
    more += f", {layout}" if layout or rows else ""
    more += f", {rows}" if rows else ""
    return f"attend<{T}, {D}, {R}, {G}, {norm}, {cut.warps}, {cut.cluster}, {cut.stages}, {page}, {kv}{more}>"


@cache
def _kernel(instance: str, device: int, warps: int, smem: int, cluster: int, serialize: bool) -> Kernel:
    per_sm = 2 if cluster > 1 else MOST_BLOCKS  # of MOST_HEADS clusters
    return Kernel("attend.cu", instance, device, 32 * warps, PARAMETERS, smem, cluster, serialize, per_sm)


CLUSTERS = gpu.since(lambda g: g.max_cluster >= CLUSTER)


@register("cuda/attend", op="attend", devices=("cuda",), min_capability=CLUSTERS, rank=40, refuse=_refuse)
def attend(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    at: Places,
    h: Heads,
    config: Config | None = None,
    layout: int = 0,
    rows: int = 0,
) -> torch.Tensor:  # fmt: skip
    """As `reference.attend`; qkv, caches and table contiguous, positions int32. layout, rows: as of
    `expression`."""
    (pos, cos, sin, table, order), kv = at, kind_of(k_cache)
    M, S, page, width = qkv.shape[0], k_cache.shape[2], 0, 0
    if table is not None and not (rows and table.shape[1] == 1):
        S, page, width = table.shape[1] * S, S, table.shape[1]
    y = torch.empty(M, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norm = 0 if h.q_norm is None else 1 if h.q_norm.dtype == qkv.dtype else 2
    on = gpu.here(qkv.device.index)
    share = 1 if rows else groups(h.HQ // h.HKV, h.D) or 1
    G = h.HQ // h.HKV // share
    Q, heads = G * (rows or 1), M // (rows or 1) * h.HKV * share  # queries of a block; number of such blocks
    cut = rows_shape(heads, S, h.D, Q, on) if rows else shape(heads, S, h.D, Q, kv, on, order is not None)
    partial = arrived = None
    if cut.cluster == 1 and cut.blocks > 1:
        partial = torch.empty(heads * cut.blocks, Q * h.D + (Q + 1) // 2 * 4, dtype=torch.float32, device=qkv.device)
        arrived = counters(heads, qkv.device)
    instance = expression(TYPES[qkv.dtype], h.D, cos.shape[1], G, norm, cut, page, NUMBERS[kv], share, h.writes, layout, rows)
    kernel = _kernel(instance, qkv.device.index, cut.warps, cut.shared, cut.cluster, launch.enabled)
    kernel(
        cut.blocks,
        heads,
        cut.shared,
        *(t.data_ptr() for t in (qkv, numbers(k_cache), numbers(v_cache), pos)),
        0 if table is None else table.data_ptr(),
        0 if order is None or heads <= on.sms else order.data_ptr(),  # the order is of no use where all heads run at once
        cos.data_ptr(),
        sin.data_ptr(),
        0 if h.q_norm is None else h.q_norm.data_ptr(),
        0 if h.q_norm is None else (h.q_norm if h.k_norm is None else h.k_norm).data_ptr(),
        0 if h.sinks is None else h.sinks.data_ptr(),
        y.data_ptr(),
        0 if partial is None else partial.data_ptr(),
        0 if arrived is None else arrived.data_ptr(),
        *(c.scales.data_ptr() if isinstance(c, Coded) else 0 for c in (k_cache, v_cache)),
        width or S,
        h.HKV,
        h.window or S + 1,
        cut.least,
        h.scale * LOG2E,
        h.eps,
        SHORTER,
    )
    return y


def rows_of_block(M: int, G: int) -> int:
    """Rows of one sequence that a block takes: a warp multiplies keys by 8 queries at once."""
    return next(n for n in (8, 4, 2, 1) if n * G <= MOST_QUERIES and M % n == 0)


def _refuse_rows(call: AttendCall) -> str | None:
    if call.M > MOST_DRAFTS + 1:
        return f"takes up to {MOST_DRAFTS + 1} rows of a sequence, not {call.M}"
    if call.kv != PLAIN:
        return f"takes caches in 16 bits, not in {call.kv}"
    if call.D > 256 or call.HQ // call.HKV > MOST_QUERIES or call.beyond or call.layout & ~GATED:
        found = f"{', '.join(call.beyond)}, not D={call.D}, layout {call.layout}"
        return f"takes heads of 64, 128 or 256 with up to {MOST_QUERIES} queries, maybe gates, and no {found}"
    if why := _refuse(replace(call, M=1)):
        return why
    blocks = call.M // rows_of_block(call.M, call.HQ // call.HKV)
    if call.D > 128 and (blocks > FEW_BLOCKS or call.layout != GATED):  # not timed: other wide heads than Qwen3.5's
        return f"takes heads of 256 with gates in up to {FEW_BLOCKS} blocks of rows, not {blocks}"
    return f"would read {call.S} slots {blocks} times" if blocks > FEW_BLOCKS and call.S > SHORT else None


@register("cuda/attend_rows", op="attend_rows", devices=("cuda",), min_capability=CLUSTERS, rank=40, refuse=_refuse_rows)
def attend_rows(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    at: Places,
    h: Heads,
    groups: Groups,
    config: Config | None = None,
    layout: int = 0,
) -> torch.Tensor:  # fmt: skip
    """As `reference.attend_rows`, where all rows are of one sequence. layout: as of `expression`."""
    rows = rows_of_block(qkv.shape[0], h.HQ // h.HKV)
    return attend(qkv, k_cache, v_cache, at._replace(order=None), h, layout=layout, rows=rows)
