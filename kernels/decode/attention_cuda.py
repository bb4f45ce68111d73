"""attend by attend.cu, for the head shapes of today's models on Hopper and later; `attend` hands every other call to Triton's.

Launch  clusters of `cluster_for` blocks for each key head of each sequence, 4 warps a block, 8 for long caches of narrow heads
"""

import ctypes
from functools import cache

import torch

from lowq_kernels.cuda_wnax.driver import Kernel
from lowq_kernels.cuda_wnax.tile_operands import TYPES, shared_memory_limit
from lowq_kernels.decode import attention, launch
from lowq_kernels.decode.attention import LOG2E
from lowq_kernels.decode.reference import Heads
from lowq_kernels.registry import capability

PARAMETERS = (*(ctypes.c_void_p,) * 9, *(ctypes.c_int32,) * 3, *(ctypes.c_float,) * 2)
BLOCKS = 256  # wanted on the GPU: about two per multiprocessor
STATIC = 41 << 10  # bytes of shared memory that attend.cu declares, at most: 8 warps, 8 queries of 128 dims
FEW_BLOCKS = 132  # up to one a multiprocessor, each may hold two tiles a warp; more would leave the next kernel no room
LONG = 4096  # slots of a cache from which a block has 8 warps: more bytes in flight


def why_not(dtype: torch.dtype, device: torch.device, R: int, h: Heads) -> str:
    """The reason attend.cu cannot take heads of this shape, or ""."""
    if dtype not in TYPES:
        return f"takes fp16 and bf16, not {dtype}"
    if capability(device) < (9, 0):
        return "clusters need compute capability 9.0"
    if h.D not in (64, 128) or R % 64 or h.HQ // h.HKV > 8:
        return f"takes heads of 64 or 128 with up to 8 queries, not D={h.D}, R={R}, {h.HQ // h.HKV} queries a key head"
    if any(w is not None and w.dtype not in (dtype, torch.float32) for w in (h.q_norm, h.k_norm)):
        return f"takes norms of {dtype} or fp32"
    return ""


def cluster_for(heads: int) -> int:
    """Blocks that share one sequence-head; 8 is what every GPU with clusters allows."""
    return next((c for c in (8, 4, 2) if heads * c <= BLOCKS), 1)


def expression(T: int, D: int, R: int, G: int, norm: int, warps: int, cluster: int, stages: int) -> str:
    """The template instance of attend.cu. norm: 0 none, 1 weights of the dtype of x, 2 fp32."""
    return f"attend<{T}, {D}, {R}, {G}, {norm}, {warps}, {cluster}, {stages}>"


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
    if why_not(qkv.dtype, qkv.device, R, h):
        return attention.attend(qkv, k_cache, v_cache, pos, cos, sin, h)
    B, S = qkv.shape[0], k_cache.shape[2]
    y = torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norm = 0 if h.q_norm is None else 1 if h.q_norm.dtype == qkv.dtype else 2
    warps, cluster = 8 if S >= LONG else 4, cluster_for(B * h.HKV)
    tile = 64 * h.D * warps  # bytes of 16 slots, k and v, for each warp
    fits = 2 * tile + STATIC <= shared_memory_limit(capability(qkv.device))
    stages = 2 if fits and B * h.HKV * cluster <= FEW_BLOCKS else 1
    instance = expression(TYPES[qkv.dtype], h.D, R, h.HQ // h.HKV, norm, warps, cluster, stages)
    kernel = _kernel(instance, qkv.device.index, warps, stages * tile, cluster, launch.enabled)
    kernel(
        cluster,
        B * h.HKV,
        stages * tile,
        *(t.data_ptr() for t in (qkv, k_cache, v_cache, pos, cos, sin)),
        0 if h.q_norm is None else h.q_norm.data_ptr(),
        0 if h.k_norm is None else h.k_norm.data_ptr(),
        y.data_ptr(),
        S,
        h.HKV,
        h.window or S + 1,
        h.scale * LOG2E,
        h.eps,
    )
    return y
