"""cuda/tile_dequant: large M from the tile layout on GPUs without wgmma: dequantise a slab of rows, cuBLAS, next slab."""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES, group_argument, rows_of_table, scales_zeros_bias, straddled, whole_product
from lowq_kernels.dispatch.registry import ANY_TABLE, Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import ROWS, chunks
from lowq_packers.tables import values

SLAB_BYTES = 64 << 20  # of dequantised weights held at once
PARAMETERS = (ctypes.c_void_p,) * 6 + (ctypes.c_int32,) * 7


SCALES = {"float": "0", "e4m3": "SCALES_E4M3", "e8m0": "SCALES_E8M0"}


def expression(bits: int, T: int, group: int, zeros: bool, table: bool = False, scale: str = "float") -> str:
    """The template instance of tile_dequant.cu."""
    of_table = f", true, {SCALES[scale]}" if table else ""
    return f"tile_dequant<{bits}, {T}, {group}, {'true' if zeros else 'false'}{of_table}>"


@cache
def _kernel(instance: str, device: int) -> Kernel:
    return Kernel("tile_dequant.cu", instance, device, 256, PARAMETERS)


@register("cuda/tile_dequant", layouts=("tile",), tables=ANY_TABLE, min_capability=gpu.LEAST, rank=40)
def tile_dequant(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): weights rounded once to x's dtype, then torch.nn.functional.linear per slab."""
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    if straddled(p):
        return whole_product(x, p, bias)
    s = p.scheme
    instance = expression(s.bits, TYPES[x.dtype], group_argument(p), zeros is not None, bool(s.table), s.scale)
    kernel = _kernel(instance, x.device.index)
    book = values(s, p.table, x.device) if s.table else None
    factors = p.table if s.table != "fitted" else None
    of_table = (0 if book is None else book.data_ptr(), 0 if factors is None else factors.data_ptr())
    y = torch.empty(x.shape[0], p.N, dtype=x.dtype, device=x.device)
    step = max(ROWS, SLAB_BYTES // (2 * p.K) // ROWS * ROWS)
    slab = torch.empty(min(step, p.N), p.K, dtype=x.dtype, device=x.device)
    C = chunks(p.K, p.scheme.bits)
    of_W = (p.words.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    pointers, sizes = (*of_W, slab.data_ptr(), *of_table), (p.K, C, scales.shape[1], rows_of_table(p), p.N)
    for n0 in range(0, p.N, step):
        rows = min(step, p.N - n0)
        kernel(math.ceil(C / 8), math.ceil(rows / ROWS), 0, *pointers, n0 // ROWS, rows, *sizes)
        part = torch.nn.functional.linear(x, slab[:rows], None if bias is None else bias[n0 : n0 + rows])
        if step >= p.N:
            return part
        y[:, n0 : n0 + rows] = part
    return y
