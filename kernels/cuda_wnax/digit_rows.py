"""x as 16-bit integers in two bytes, for the products that take codes as bytes. See digit_rows.cu."""

import ctypes
from functools import cache

import torch

from lowq_kernels.cuda_wnax.driver import Kernel
from lowq_kernels.cuda_wnax.tile_operands import TYPES
from lowq_packers.layouts.tile import CHUNK

SPAN = 128  # k that share a unit
PARAMETERS = (ctypes.c_void_p,) * 3 + (ctypes.c_int32,) * 3


@cache
def _prepared(T: int, short: bool, place: int, quads: bool, device: int) -> Kernel:
    serialize = torch.cuda.get_device_capability(device) >= (9, 0)
    instance = f"digit_rows<{T}, {str(short).lower()}, {place}, {str(quads).lower()}>"
    return Kernel("digit_rows.cu", instance, device, 128, PARAMETERS, serialize=serialize)


def digit_rows(x: torch.Tensor, bits: int, place: int = 0, quads: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) fp16 or bf16, aligned, K a multiple of 8 -> its digits (2 * M, K') bytes and units (K' / 128, M', 2) fp32.

    K' is the next multiple of 128, M' a power of two from 4 up: rows past M are not written. bits: whose order of k it is;
    place, quads: digit_rows.cu's PLACE and QUADS.
    """
    M, K = x.shape
    steps = -(-K // SPAN)
    digits = torch.empty(2 * M, steps * SPAN, dtype=torch.uint8, device=x.device)
    units = torch.empty(steps, max(4, 1 << (M - 1).bit_length()), 2, dtype=torch.float32, device=x.device)
    kernel = _prepared(TYPES[x.dtype], CHUNK[bits] == 64, place, quads, x.device.index)
    kernel(-(-steps // 16), M, 0, x.data_ptr(), digits.data_ptr(), units.data_ptr(), K, steps, units.shape[1])
    return digits, units
