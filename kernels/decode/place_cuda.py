"""Each sequence's newest token into a cache in few bits, its queries for attend.cu (place.cu): a step's `kv_triton.place`."""

import ctypes
from functools import cache

import torch

from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode import launch
from lowq_kernels.decode.kv import SHORTER, TRIES, Coded
from lowq_kernels.decode.kv_triton import NUMBERS
from lowq_kernels.decode.reference import Heads

PARAMETERS = (*(ctypes.c_void_p,) * 12, *(ctypes.c_int32,) * 4, *(ctypes.c_float,) * 2)
HEADS = 4  # of a block


def expression(T: int, D: int, R: int, norm: int, kv: int) -> str:
    """The template instance of place.cu. norm: 0 none, 1 weights of the dtype of x, 2 fp32; kv: 8 or 4."""
    return f"place<{T}, {D}, {R}, {norm}, {kv}, {TRIES}>"


@cache
def _kernel(instance: str, device: int, threads: int, serialize: bool) -> Kernel:
    return Kernel("place.cu", instance, device, threads, PARAMETERS, serialize=serialize)


def place(
    qkv: torch.Tensor,
    caches: tuple[Coded, Coded],
    pos: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    norm: int,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Queries (B, HQ * D) of qkv (B, (HQ + 2 HKV) * D), turned for 4 bits; keys and values go into the cache at pos (B,)."""
    B, width = qkv.shape[0], 0 if table is None else table.shape[1]
    q = torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    instance = expression(TYPES[qkv.dtype], h.D, cos.shape[1], norm, NUMBERS[caches[0].kind])
    _kernel(instance, qkv.device.index, h.D // 4 * HEADS, launch.enabled)(
        -(-(h.HQ + 2 * h.HKV) // HEADS),
        B,
        0,
        qkv.data_ptr(),
        *(c.codes.data_ptr() for c in caches),
        *(c.scales.data_ptr() for c in caches),
        *(0 if t is None else t.data_ptr() for t in (pos, table, cos, sin, h.q_norm, h.k_norm)),
        q.data_ptr(),
        *(h.HQ, h.HKV, caches[0].shape[2], width),
        h.eps,
        SHORTER,
    )
    return q
