"""x as two int8 planes, the high and the low bytes of 16-bit integers: x of tile_int8x2. See int8_planes.cu."""

import ctypes
from functools import cache

import torch

from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES

SPAN = 128  # k that share a unit (a scale of x)
PARAMETERS = (ctypes.c_void_p,) * 3 + (ctypes.c_int32,) * 3


def rows_of_units(M: int) -> int:
    """M', the padded rows of units: a power of two from 4 up."""
    return max(4, 1 << (M - 1).bit_length())


@cache
def _prepared(T: int, bits: int, device: int) -> Kernel:
    return Kernel("int8_planes.cu", f"int8_planes<{T}, {bits}>", device, 128, PARAMETERS, serialize=True)


def int8_planes(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) fp16 or bf16, aligned, K a multiple of 8 -> its planes (2 * M, K') int8 and units (K' / 128, M', 2) fp32.

    K' is the next multiple of 128; rows of units past M are not written. bits: the width of the weight's codes, up to 4.
    """
    M, K = x.shape
    steps = -(-K // SPAN)
    planes = torch.empty(2 * M, steps * SPAN, dtype=torch.uint8, device=x.device)
    units = torch.empty(steps, rows_of_units(M), 2, dtype=torch.float32, device=x.device)
    kernel = _prepared(TYPES[x.dtype], bits, x.device.index)
    kernel(-(-steps // 16), M, 0, x.data_ptr(), planes.data_ptr(), units.data_ptr(), K, steps, units.shape[1])
    return planes, units
