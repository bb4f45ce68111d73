"""Products with fp8 weights: which kernel, on which hardware.

Hopper                         cuda/fp8_gemm (gemm_wgmma.py); triton where NVRTC is missing or K is no multiple of 16
other GPUs with FP8 (8.9, 10+) triton/fp8_gemm
anything else                  widened once to 16 bits and multiplied as such: `has_fp8` says which, linear.py does it
"""

from functools import cache
from typing import Any

import torch

from lowq_kernels import gpu
from lowq_kernels.activations import Act
from lowq_kernels.dispatch.registry import Config
from lowq_kernels.optional import optional
from lowq_kernels.products.dequant import SLAB_BYTES
from lowq_packers.errors import UnsupportedError
from lowq_packers.fp8 import Block, Fp8Matrix

GROUP = 128  # values of a token that share a scale
WIDEN_M = 128  # rows beyond which 16-bit activations are worth widening the weight for


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3: NVIDIA from capability 8.9 on, with triton installed."""
    if not gpu.of(gpu.capability(device)).fp8:
        return False
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


@cache
def _wgmma(device: torch.device) -> Any:
    """gemm_wgmma where it can run, else None."""
    return optional("lowq_kernels.fp8.gemm_wgmma", "cuda") if gpu.of(gpu.capability(device)).wgmma else None


def activation_block(w: Fp8Matrix) -> Block:
    """How activations are quantized against these weights: groups of 128 against blocks, whole tokens against channels."""
    return (1, GROUP) if w.block[0] > 1 else (1, w.q.shape[1])


def matmul(x: torch.Tensor, w: Fp8Matrix, bias: torch.Tensor | None = None, act: Act = "fp8") -> torch.Tensor:
    """x (M, K) fp16 or bf16 @ W (N, K)^T + bias -> (M, N), x's dtype; x is rounded to fp8 on the way unless act is "none".

    Raises UnsupportedError on a device without FP8, and for int8 activations.
    """
    if not has_fp8(x.device) or act == "int8":
        raise UnsupportedError(f"fp8 weights with act={act} have no kernel on {x.device}")
    from lowq_kernels.fp8 import gemm_triton
    from lowq_kernels.fp8.block_quant import fp8_block_quant

    x = x.contiguous()
    if act == "none" and x.shape[0] > WIDEN_M:
        return widened_product(x, w, bias)
    if act == "none":
        return gemm_triton.fp8_gemm(x, w, bias, x.dtype, gemm_triton.config_for(x.shape[0], *w.q.shape))
    return multiply(fp8_block_quant(x, activation_block(w)), w, bias, x.dtype)


def widened_product(x: torch.Tensor, w: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) @ W^T + bias -> (M, N): W widened to x's dtype a slab of rows at a time, then the library's product.

    What 16-bit activations take at large M; SLAB_BYTES of scratch, whatever the layer's size.
    """
    (N, K), rows = w.q.shape, w.block[0]
    y = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    step = max(1, SLAB_BYTES // (2 * K * rows)) * rows
    for n0 in range(0, N, step):
        part = slice(n0, min(n0 + step, N))
        slab = Fp8Matrix(w.q[part], w.scales[n0 // rows : -(-part.stop // rows)], w.block).dequantize(x.dtype)
        y[:, part] = torch.nn.functional.linear(x, slab, None if bias is None else bias[part].to(x.dtype))
    return y


def kernel_for(device: torch.device, K: int, act: Act) -> str:
    """The name of the kernel that `matmul` takes."""
    return "cuda/fp8_gemm" if act != "none" and _wgmma(device) is not None and K % 16 == 0 else "triton/fp8_gemm"


def multiply(x: Fp8Matrix, w: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Two quantized matrices -> (M, N) in `dtype`."""
    from lowq_kernels.fp8 import gemm_triton

    M, (N, K) = x.q.shape[0], w.q.shape
    wgmma = _wgmma(x.q.device)
    if wgmma is not None and K % 16 == 0:
        config: Config = wgmma.config_for(x, w)
        return wgmma.fp8_gemm(x, w, bias, dtype, config)
    return gemm_triton.fp8_gemm(x, w, bias, dtype, gemm_triton.config_for(M, N, K))
