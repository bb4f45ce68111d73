"""cuda/attend: attend.cu, for the head shapes of today's models on Hopper and later.

Launch  a cluster of 8 blocks of 4 warps for each key head of few sequences; for long caches as many blocks of 8 warps for each
        as together fill the GPU; for many heads one of 8 warps each, two where the text is long
Speed   us in a chain on an H100 (Triton's), 8 key heads of 128: one sequence of 100 slots 3.2 (5.6), 2000 6.3 (10.3), 32000
        46 (73), in fp8 27 (83), in 4 bits 17 (94); eight of 4400 50 (56), 29 (68), 18 (90); 64 of 500 in blocks 48 (52);
        64 of 59 to 3,390 in blocks 74, the longest first 62
"""

import ctypes
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
from lowq_kernels.decode.reference import Heads
from lowq_kernels.dispatch.registry import Config, register

PARAMETERS = (*(ctypes.c_void_p,) * 16, *(ctypes.c_int32,) * 4, *(ctypes.c_float,) * 3)
TILES = {"16": 2, "fp8": 3, "4": 4}
NARROW, WIDE = 4, 8  # warps of a block
CLUSTER = 8  # blocks: what every GPU with clusters allows
MOST_HEADS = 32  # key heads of all sequences together that clusters, or blocks that fill the GPU, share
FEW_WAVES = 3  # heads an SM up to which the longest texts would end alone
SPLITS = 2  # blocks of a head at most where heads alone fill the GPU: those that have nothing to do take 1 us a 512
TWO_WAVES, ORDERED_SPLITS = 2, 4  # heads an SM beyond which, the longest first, it runs two blocks; blocks of a head then
LEAST, LEAST_MANY = 32, 192  # tiles of a block there: with few waves texts of 1,024 slots are cut, with many those of 6,144
STATIC = 8 << 10  # bytes of shared memory that attend.cu declares, at most: 8 warps, 8 queries of 128 dims, codes


def _ring(D: int, warps: int, kv: str, stages: int) -> int:
    """Bytes of shared memory of a block: each warp has so many tiles of 16 slots, k and v, on their way; more than its sums of
    8 queries, which are written over them at the end."""
    return stages * warps * 2 * 16 * slot_bytes(kv, D, torch.float16)


def _declared(D: int, G: int, warps: int, kv: str) -> int:
    """Bytes of shared memory that attend.cu declares without a cluster, up to 32 more."""
    return 8 * warps * G + (0 if kv == PLAIN else 512 * warps) + 2 * G * (D + 8) + 2 * slot_bytes(kv, D, torch.float16) + 40


class Shape(NamedTuple):
    """How a call is launched: warps of a block, blocks of a cluster, tiles on their way to a warp, blocks of a head, tiles that
    each of them takes at least, bytes of shared memory beside what attend.cu declares."""

    warps: int
    cluster: int
    stages: int
    blocks: int
    least: int
    shared: int


def shape(heads: int, S: int, D: int, G: int, kv: str, on: gpu.Gpu, ordered: bool = False) -> Shape:
    """For so many key heads of all sequences together, each with G queries and a cache of S slots; ordered: longest first.

    A block of 8 warps asks for so much shared memory that no two fit an SM. The next layer's blocks come while this one's still
    run, and go where there is room: two on an SM that was idle, of which each then has half (4 bits, 128,000 slots: 117 us for
    65). Codes of many heads take more arithmetic than reading, so several blocks an SM (64 texts of 500: 30 us for 40).
    """
    few, tiles = heads <= MOST_HEADS, TILES[kv]
    wide = _ring(D, WIDE, kv, tiles) + STATIC <= on.smem_block
    if few and not (wide and S >= LONG):
        return Shape(NARROW, CLUSTER, tiles, CLUSTER, 1, _ring(D, NARROW, kv, tiles))
    if ordered and wide and kv == PLAIN and heads > TWO_WAVES * on.sms:
        return Shape(WIDE, 1, 1, ORDERED_SPLITS, LEAST, _ring(D, WIDE, kv, 1))
    waves = heads <= FEW_WAVES * on.sms
    blocks, least = (SPLITS, LEAST if waves else LEAST_MANY) if heads > on.sms else (on.sms // heads, 1 if few else LEAST)
    if wide and (waves or kv == PLAIN):
        alone = on.smem_sm // 2 + 1 - _declared(D, G, WIDE, kv) - SYSTEM
        return Shape(WIDE, 1, tiles, blocks, least, max(_ring(D, WIDE, kv, tiles), alone))
    return Shape(NARROW, 1, tiles, blocks, least, _ring(D, NARROW, kv, tiles))


def at_once(cut: Shape, D: int, G: int, kv: str, on: gpu.Gpu) -> int:
    """Blocks of a shape without a cluster that an SM runs at once."""
    return min(16 // cut.warps, on.smem_sm // (cut.shared + _declared(D, G, cut.warps, kv) + SYSTEM))


def _refuse(call: AttendCall) -> str | None:
    if why := usual(call):
        return why
    queries = call.HQ // call.HKV
    if call.D not in (64, 128) or not call.R or call.R % 64 or queries > 8:
        return f"takes heads of 64 or 128 with up to 8 queries, not D={call.D}, R={call.R}, {queries} queries a key head"
    if call.norm not in (None, call.dtype, torch.float32):
        return f"takes norms of {call.dtype} or fp32"
    if call.block and (call.block < 16 or call.block & (call.block - 1)):
        return f"takes blocks of a power of two from 16 slots up, not {call.block}"
    on = gpu.here()
    if call.kv != PLAIN:  # at any number of heads: Triton's kernel takes 3 times as long in fp8, and 8 in 4 bits
        return f"takes caches in {call.kv} of a multiple of 16 slots, not {call.S}" if call.S % 16 else None
    heads = call.M * call.HKV
    cut = shape(heads, call.S, call.D, queries, call.kv, on)
    short = heads > on.sms and call.S < LONG  # 64 texts of 128 slots: 21 us for 17, of 400: 35 for 36
    if short or ((cut.warps, cut.cluster) == (NARROW, 1) and at_once(cut, call.D, queries, call.kv, on) < 2):
        return f"{heads} key heads of all sequences, which Triton's kernel takes as fast"
    return None


def expression(T: int, D: int, R: int, G: int, norm: int, cut: Shape, page: int = 0, kv: int = 0) -> str:
    """The template instance of attend.cu. norm: 0 none, 1 weights of the dtype of x, 2 fp32. page: slots of a block, or 0."""
    return f"attend<{T}, {D}, {R}, {G}, {norm}, {cut.warps}, {cut.cluster}, {cut.stages}, {page}, {kv}>"


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
    pos: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    table: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """As `reference.attend`; qkv, caches and table contiguous, pos (B,) int32, cos and sin (S, R)."""
    kv = kind_of(k_cache)
    B, S, page, width = qkv.shape[0], k_cache.shape[2], 0, 0
    if table is not None:
        S, page, width = table.shape[1] * S, S, table.shape[1]
    y = torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norm = 0 if h.q_norm is None else 1 if h.q_norm.dtype == qkv.dtype else 2
    on = gpu.here(qkv.device.index)
    G, heads = h.HQ // h.HKV, B * h.HKV
    cut = shape(heads, S, h.D, G, kv, on, order is not None)
    partial = arrived = None
    if cut.cluster == 1 and cut.blocks > 1:
        partial = torch.empty(heads * cut.blocks, G * h.D + (G + 1) // 2 * 4, dtype=torch.float32, device=qkv.device)
        arrived = counters(heads, qkv.device)
    instance = expression(TYPES[qkv.dtype], h.D, cos.shape[1], G, norm, cut, page, NUMBERS[kv])
    kernel = _kernel(instance, qkv.device.index, cut.warps, cut.shared, cut.cluster, launch.enabled)
    kernel(
        cut.blocks,
        heads,
        cut.shared,
        *(t.data_ptr() for t in (qkv, numbers(k_cache), numbers(v_cache), pos)),
        0 if table is None else table.data_ptr(),
        0 if order is None or heads <= on.sms else order.data_ptr(),  # all heads run at once
        cos.data_ptr(),
        sin.data_ptr(),
        0 if h.q_norm is None else h.q_norm.data_ptr(),
        0 if h.k_norm is None else h.k_norm.data_ptr(),
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
