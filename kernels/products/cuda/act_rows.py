"""Rounds activations to 8 bits per token and back in one launch, for 16-bit products under --act. See act_rows.cu."""

import ctypes
from functools import cache

import torch

from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES, aligned

PARAMETERS = (ctypes.c_void_p,) * 2 + (ctypes.c_int32,)


@cache
def _prepared(T: int, int8: bool, device: int | None) -> Kernel:
    return Kernel("act_rows.cu", f"round_rows<{T}, {str(int8).lower()}>", device or 0, 256, PARAMETERS, serialize=True)


def rounded_rows(x: torch.Tensor, act: str) -> torch.Tensor:
    """The result of `activations.rounded` for x (M, K) fp16 or bf16 on a GPU, bit for bit."""
    x = aligned(x.contiguous())
    y = torch.empty_like(x)
    if y.numel():
        _prepared(TYPES[x.dtype], act == "int8", x.device.index)(x.shape[0], 1, 0, x.data_ptr(), y.data_ptr(), x.shape[1])
    return y
