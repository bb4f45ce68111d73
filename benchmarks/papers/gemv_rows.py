"""cuda/gemv_rows: FastGEMV over rowstream rows (8, 4, 2, 1 bits) and dense half rows, with groups, tails and M > 1.

A config: P threads share a dot product, ROWS dot products a block.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES, aligned, group_argument, scales_zeros_bias
from lowq_kernels.dispatch.registry import Call, Config
from lowq_packers.bitstream import words_per_row
from lowq_packers.errors import SchemeError
from lowq_packers.layouts import PackedWeight
from papers import paper

CONFIGS: tuple[Config, ...] = tuple(
    {"P": p, "ROWS": r} for p, r in ((32, 8), (32, 4), (64, 4), (128, 4), (128, 2), (256, 1), (512, 2))
)
PARAMETERS = (ctypes.c_void_p,) * 6 + (ctypes.c_int32,) * 4
DENSE = 16  # the device code's BITS of a dense half row


def expression(bits: int, T: int, group: int, zeros: bool, config: Config) -> str:
    """The template instance of gemv_rows.cu."""
    return f"gemv_rows<{bits}, {T}, {group}, {'true' if zeros else 'false'}, {config['P']}, {config['ROWS']}>"


@cache
def _kernel(instance: str, device: int, threads: int) -> Kernel:
    return Kernel("gemv_rows.cu", instance, device, threads, PARAMETERS)


def _refuse(call: Call) -> str | None:
    if call.K % 16 or words_per_row(call.K, call.scheme.bits) % 4:
        return f"rows must be multiples of 16 codes and 16 bytes, K={call.K} is not"
    return None


def _default_config(call: Call, legal: list[Config]) -> Config:
    """P grows with the row: a thread should have a few 16-byte loads to itself."""
    loads = call.K * call.scheme.bits // 128
    return next(c for c in legal if c["P"] == (32 if loads < 512 else 64 if loads < 1024 else 128))


def _launch(
    x: torch.Tensor, words: torch.Tensor, N: int, instance: str, config: Config, meta: tuple[int, int, int, int]
) -> torch.Tensor:
    y = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    x = aligned(x)
    if x.shape[0]:
        kernel = _kernel(instance, x.device.index, config["P"] * config["ROWS"])
        row_words = words.shape[1] * words.element_size() // 4
        scales, zeros, bias, groups = meta
        grid = (math.ceil(N / config["ROWS"]), x.shape[0])
        kernel(*grid, 0, words.data_ptr(), scales, zeros, bias, x.data_ptr(), y.data_ptr(), N, x.shape[1], row_words, groups)
    return y


@paper(
    "cuda/gemv_rows",
    layouts=("rowstream",),
    bits=(8, 4, 2, 1),
    min_capability=gpu.LEAST,
    m_range=(1, 65535),
    configs=CONFIGS,
    refuse=_refuse,
    default_config=_default_config,
)
def gemv_rows(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N), straight from the layout that files hold."""
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    instance = expression(p.scheme.bits, TYPES[x.dtype], group_argument(p), zeros is not None, config)
    pointers = (scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), 0 if bias is None else bias.data_ptr())
    return _launch(x, p.words, p.N, instance, config, (*pointers, scales.shape[1]))


def gemv_rows_dense(x: torch.Tensor, W: torch.Tensor, config: Config = CONFIGS[2]) -> torch.Tensor:
    """x (M, K) @ W (N, K)^T, both fp16 or both bf16 -> (M, N): FastGEMV's fp16 kernel.

    Raises SchemeError where dtypes differ or K is not a multiple of 16.
    """
    if x.dtype != W.dtype or x.dtype not in TYPES or W.shape[1] % 16 or x.shape[1] != W.shape[1]:
        raise SchemeError(
            f"gemv_rows_dense takes x and W of one half dtype and K a multiple of 16, not {x.shape} and {W.shape}"
        )
    return _launch(
        x.contiguous(), W.contiguous(), W.shape[0], expression(DENSE, TYPES[x.dtype], 0, False, config), config, (0, 0, 0, 1)
    )
