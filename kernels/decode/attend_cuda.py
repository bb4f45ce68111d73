"""cuda/attend: attend.cu, for the head shapes of today's models on Hopper and later.

Launch  a cluster of 8 blocks of 4 warps for each key head of each sequence; for long caches as many blocks of 8 warps for each
        as together fill the GPU
Speed   us on an H100 in a chain (Triton's), 8 key heads of 128: one sequence of 128 slots 3.2 (5.3), 639 4.0 (6.4),
        30000 52 (70); four of up to 1000 9.7 (11.5); eight of 100 7.3 (6.6), sixty-four 13.9 (13.6): so many go to Triton's
"""

import ctypes
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode import launch
from lowq_kernels.decode.attend import LONG, AttendCall
from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv import PLAIN, Cache, Coded, kind_of, slot_bytes
from lowq_kernels.decode.kv_triton import NUMBERS, numbers
from lowq_kernels.decode.place_cuda import place
from lowq_kernels.decode.reference import Heads
from lowq_kernels.dispatch.registry import Config, register

PARAMETERS = (*(ctypes.c_void_p,) * 15, *(ctypes.c_int32,) * 3, *(ctypes.c_float,) * 2)
TILES = {"16": 2, "fp8": 3, "4": 4}
WIDE = 8  # warps of a block where blocks fill the GPU
CLUSTER = 8  # blocks: what every GPU with clusters allows
MOST_PER_SM = 1  # key heads of all sequences together, where blocks fill the GPU
MOST_HEADS = 32  # key heads of all sequences together, of short caches
SYSTEM = 1 << 10  # bytes of shared memory that every block takes beside its own
STATIC = 41 << 10  # bytes of shared memory that attend.cu declares, at most: 8 warps, 8 queries of 128 dims


def _ring(D: int, warps: int, kv: str = PLAIN) -> int:
    """Bytes of shared memory of a block: each warp has so many tiles of 16 slots, k and v, on their way."""
    return TILES[kv] * warps * 2 * 16 * slot_bytes(kv, D, torch.float16)


def _shared(D: int, G: int, warps: int, kv: str, fills: bool, on: gpu.Gpu) -> int:
    """Bytes of shared memory that a launch asks for beside what attend.cu declares: so many that no two of its blocks fit an SM
    where they fill the GPU.

    The next layer's blocks come while this one's still run, and go where there is room: two on an SM that was idle, of which
    each then has half (4 bits, 128,000 slots: 117 us for 65).
    """
    declared = 4 * warps * G * (D + 6) + 16
    return max(_ring(D, warps, kv), on.smem_sm // 2 + 1 - declared - SYSTEM if fills else 0)


def _fills(S: int, D: int, on: gpu.Gpu, kv: str = PLAIN) -> bool:
    """Whether as many blocks of WIDE warps as fill the GPU share each sequence-head, not a cluster."""
    return (S >= LONG or kv != PLAIN) and _ring(D, WIDE, kv) + STATIC <= on.smem_block


def _refuse(call: AttendCall) -> str | None:
    queries = call.HQ // call.HKV
    if call.D not in (64, 128) or call.R % 64 or queries > 8:
        return f"takes heads of 64 or 128 with up to 8 queries, not D={call.D}, R={call.R}, {queries} queries a key head"
    if call.norm not in (None, call.dtype, torch.float32):
        return f"takes norms of {call.dtype} or fp32"
    if call.block and (call.block < 16 or call.block & (call.block - 1)):
        return f"takes blocks of a power of two from 16 slots up, not {call.block}"
    on = gpu.here()
    if call.kv != PLAIN:  # at any number of heads: Triton's kernel takes 3 times as long in fp8, and 8 in 4 bits
        return f"takes caches in {call.kv} of a multiple of 16 slots, not {call.S}" if call.S % 16 else None
    if (on.sms * MOST_PER_SM if _fills(call.S, call.D, on) else MOST_HEADS) < call.M * call.HKV:
        return f"{call.M * call.HKV} key heads of all sequences, which Triton's kernel takes as fast"
    return None


def expression(T: int, D: int, R: int, G: int, norm: int, warps: int, cluster: int, page: int = 0, kv: int = 0) -> str:
    """The template instance of attend.cu. norm: 0 none, 1 weights of the dtype of x, 2 fp32. page: slots of a block, or 0."""
    return f"attend<{T}, {D}, {R}, {G}, {norm}, {warps}, {cluster}, {page}, {kv}>"


@cache
def _kernel(instance: str, device: int, warps: int, smem: int, cluster: int, serialize: bool) -> Kernel:
    return Kernel("attend.cu", instance, device, 32 * warps, PARAMETERS, smem, cluster, serialize)


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
    config: Config | None = None,
) -> torch.Tensor:
    """As `reference.attend`; qkv, caches and table contiguous, pos (B,) int32, cos and sin (S, R)."""
    R, kv = cos.shape[1], kind_of(k_cache)
    B, S, page, width = qkv.shape[0], k_cache.shape[2], 0, 0
    if table is not None:
        S, page, width = table.shape[1] * S, S, table.shape[1]
    y = torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norm = 0 if h.q_norm is None else 1 if h.q_norm.dtype == qkv.dtype else 2
    on = gpu.here(qkv.device.index)
    warps, cluster = (WIDE, 1) if _fills(S, h.D, on, kv) else (4, CLUSTER)
    G, heads = h.HQ // h.HKV, B * h.HKV
    blocks = max(1, on.sms // heads) if cluster == 1 else cluster
    partial = arrived = None
    if cluster == 1 and blocks > 1:
        partial = torch.empty(heads * blocks, G * h.D + (G + 1) // 2 * 4, dtype=torch.float32, device=qkv.device)
        arrived = counters(heads, qkv.device)
    if isinstance(k_cache, Coded) and isinstance(v_cache, Coded):
        qkv = place(qkv, (k_cache, v_cache), pos, cos, sin, h, norm, table)
        R, norm = h.D, 0  # what `place` has done already is not compiled in
    instance = expression(TYPES[qkv.dtype], h.D, R, G, norm, warps, cluster, page, NUMBERS[kv])
    shared = _shared(h.D, G, warps, kv, cluster == 1, on)
    kernel = _kernel(instance, qkv.device.index, warps, shared, cluster, launch.enabled)
    kernel(
        blocks,
        heads,
        shared,
        *(t.data_ptr() for t in (qkv, numbers(k_cache), numbers(v_cache), pos)),
        0 if table is None else table.data_ptr(),
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
        h.scale * LOG2E,
        h.eps,
    )
    return y
