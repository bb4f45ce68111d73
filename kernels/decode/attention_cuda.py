"""attend by attend.cu, for the head shapes of today's models on Hopper and later; `attend` hands every other call to Triton's.

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
from lowq_kernels.decode import attention, launch
from lowq_kernels.decode.attention import LOG2E
from lowq_kernels.decode.reference import Heads

PARAMETERS = (*(ctypes.c_void_p,) * 11, *(ctypes.c_int32,) * 3, *(ctypes.c_float,) * 2)
CLUSTER = 8  # blocks: what every GPU with clusters allows
MOST_HEADS = 32  # key heads of all sequences together, of short caches
STATIC = 41 << 10  # bytes of shared memory that attend.cu declares, at most: 8 warps, 8 queries of 128 dims
LONG = 4096  # slots of a cache from which blocks fill the GPU: clusters of 8 leave half of its SMs without one


def why_not(B: int, dtype: torch.dtype, device: torch.device, R: int, h: Heads, S: int = 0) -> str:
    """The reason B sequences of up to S slots with heads of this shape are not for attend.cu, or ""."""
    if dtype not in TYPES:
        return f"takes fp16 and bf16, not {dtype}"
    if gpu.of(gpu.capability(device)).max_cluster < CLUSTER:
        return "clusters need compute capability 9.0"
    if h.D not in (64, 128) or R % 64 or h.HQ // h.HKV > 8:
        return f"takes heads of 64 or 128 with up to 8 queries, not D={h.D}, R={R}, {h.HQ // h.HKV} queries a key head"
    if any(w is not None and w.dtype not in (dtype, torch.float32) for w in (h.q_norm, h.k_norm)):
        return f"takes norms of {dtype} or fp32"
    if (gpu.here(device.index).sms if S >= LONG else MOST_HEADS) < B * h.HKV:
        return f"{B * h.HKV} key heads of all sequences, which Triton's kernel takes as fast"
    return ""


def expression(T: int, D: int, R: int, G: int, norm: int, warps: int, cluster: int) -> str:
    """The template instance of attend.cu. norm: 0 none, 1 weights of the dtype of x, 2 fp32."""
    return f"attend<{T}, {D}, {R}, {G}, {norm}, {warps}, {cluster}>"


@cache
def _kernel(instance: str, device: int, warps: int, smem: int, cluster: int, serialize: bool) -> Kernel:
    return Kernel("attend.cu", instance, device, 32 * warps, PARAMETERS, smem, cluster, serialize)


def attend(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pos: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
) -> torch.Tensor:
    """As `reference.attend`; qkv and caches contiguous, pos (B,) int32, cos and sin (S, R)."""
    R = cos.shape[1]
    B, S = qkv.shape[0], k_cache.shape[2]
    if why_not(B, qkv.dtype, qkv.device, R, h, S):
        return attention.attend(qkv, k_cache, v_cache, pos, cos, sin, h)
    y = torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norm = 0 if h.q_norm is None else 1 if h.q_norm.dtype == qkv.dtype else 2
    tile = 64 * h.D  # bytes of 16 slots, k and v; a warp has two on their way
    on = gpu.here(qkv.device.index)
    long = S >= LONG and 16 * tile + STATIC <= on.smem_block
    warps, cluster = (8, 1) if long else (4, CLUSTER)
    G, heads = h.HQ // h.HKV, B * h.HKV
    blocks = max(1, on.sms // heads) if cluster == 1 else cluster
    partial = arrived = None
    if cluster == 1 and blocks > 1:
        partial = torch.empty(heads * blocks, G * h.D + (G + 1) // 2 * 4, dtype=torch.float32, device=qkv.device)
        arrived = counters(heads, qkv.device)
    instance = expression(TYPES[qkv.dtype], h.D, R, G, norm, warps, cluster)
    kernel = _kernel(instance, qkv.device.index, warps, 2 * warps * tile, cluster, launch.enabled)
    kernel(
        blocks,
        heads,
        2 * warps * tile,
        *(t.data_ptr() for t in (qkv, k_cache, v_cache, pos, cos, sin)),
        0 if h.q_norm is None else h.q_norm.data_ptr(),
        0 if h.k_norm is None else h.k_norm.data_ptr(),
        y.data_ptr(),
        0 if partial is None else partial.data_ptr(),
        0 if arrived is None else arrived.data_ptr(),
        S,
        h.HKV,
        h.window or S + 1,
        h.scale * LOG2E,
        h.eps,
    )
    return y
