"""cuda/gemv_warp32: GemLite's CUDA GEMV over the layout warp32, with the groups, tails and M > 1 that it lacked.

A config: SUM, how products are summed (the device code's list: 0 four fp32 accumulators, 1 one, 2 half2), and WARPS, rows
of W of a block. `gemv_warp32_int8` is its variant for int8 activations.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES, group_argument, scales_zeros_bias
from lowq_kernels.dispatch.registry import Call, Config
from lowq_packers.errors import SchemeError
from lowq_packers.layouts import PackedWeight
from papers import paper

FP32X4, FP32, HALF2, INT32, DP4A = range(5)
CONFIGS: tuple[Config, ...] = tuple({"SUM": s, "WARPS": w} for s in (FP32X4, FP32, HALF2) for w in (8, 32))
PARAMETERS = (ctypes.c_void_p,) * 6 + (ctypes.c_int32,) * 4


def expression(bits: int, T: int, group: int, zeros: bool, SUM: int, WARPS: int) -> str:
    """The template instance of gemv_warp32.cu."""
    return f"gemv_warp32<{bits}, {T}, {group}, {'true' if zeros else 'false'}, {SUM}, {WARPS}>"


@cache
def _kernel(instance: str, device: int, warps: int) -> Kernel:
    limit = gpu.here(device).smem_block - 1024
    return Kernel("gemv_warp32.cu", instance, device, 32 * warps, PARAMETERS, smem=limit)


def _padded(K: int, bits: int) -> int:
    """k of a row of words."""
    step = 32 * (32 // bits)
    return math.ceil(K / step) * step


def _refuse(call: Call) -> str | None:
    if 2 * _padded(call.K, call.scheme.bits) > gpu.of(call.capability).smem_block - 1024:
        return f"a row of x must fit shared memory, K={call.K} does not"
    return None


def _config_refuse(call: Call, config: Config) -> str | None:
    if config["SUM"] == HALF2 and call.dtype != torch.float16:
        return "half2 sums are for fp16"
    if config["SUM"] == HALF2 and call.scheme.bits == 8:
        return "code * x of 8 bits leaves fp16's range at x = 257"
    return None


def _launch(
    x: torch.Tensor, y: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, T: torch.dtype, SUM: int, W: int
) -> None:
    scales, zeros, bias = scales_zeros_bias(p, bias, T)
    instance = expression(p.scheme.bits, TYPES[T], group_argument(p), zeros is not None, SUM, W)
    M, K = x.shape
    grid = (math.ceil(p.N / W), M, _padded(K, p.scheme.bits) * x.element_size())
    of_W = (p.words.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    pointers = (*of_W, 0 if bias is None else bias.data_ptr(), x.data_ptr(), y.data_ptr())
    _kernel(instance, x.device.index, W)(*grid, *pointers, p.N, K, p.words.shape[1], scales.shape[1])


@paper(
    "cuda/gemv_warp32",
    layouts=("warp32",),
    min_capability=gpu.LEAST,
    m_range=(1, 65535),
    configs=CONFIGS,
    refuse=_refuse,
    config_refuse=_config_refuse,
)
def gemv_warp32(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): one warp a row of W, rows of x one after the other."""
    y = torch.empty(x.shape[0], p.N, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _launch(x, y, p, bias, x.dtype, config["SUM"], config["WARPS"])
    return y


def gemv_warp32_int8(x: torch.Tensor, p: PackedWeight, dp4a: bool = True) -> torch.Tensor:
    """x (M, K) int8 -> (M, N) fp32: products summed exactly in int32 within a group, then scaled; one group and scale 1 give
    GemLite's A8iWnO32i.

    dp4a: four products an instruction (unsigned codes by signed x, so any zero is right); not at 3 bits, whose ten codes a
    word are no multiple of four.
    Raises SchemeError for an x that is not int8, a layout other than warp32, or a K whose x does not fit shared memory.
    """
    if x.dtype != torch.int8 or p.layout != "warp32":
        raise SchemeError(f"gemv_warp32_int8 takes int8 x and layout warp32, not {x.dtype} and {p.layout}")
    if _padded(p.K, p.scheme.bits) > gpu.here(x.device.index).smem_block - 1024:
        raise SchemeError(f"K={p.K}: a row of x must fit shared memory")
    y = torch.empty(x.shape[0], p.N, dtype=torch.float32, device=x.device)
    dtype = p.scales.dtype if p.scales.dtype in TYPES else torch.float16
    if x.shape[0]:
        _launch(x.contiguous(), y, p, None, dtype, DP4A if dp4a and p.scheme.bits != 3 else INT32, 8)
    return y
