"""Products with fp8 weights. `registry.select` chooses the kernel (op "fp8_product"):

Hopper                         cuda/fp8_gemm (gemm_wgmma.py); triton where NVRTC is missing or K is not a multiple of 16
other GPUs with FP8 (8.9, 10+) triton/fp8_gemm
many rows of 16 bits           fp8_widened: the weight widened a slab at a time
anything else                  widened once to 16 bits and multiplied as such: `has_fp8` says which
"""

from dataclasses import replace

import torch

from lowq_kernels import gpu
from lowq_kernels.activations import Act, rounded
from lowq_kernels.dispatch.registry import Config, register, select
from lowq_kernels.fp8.call import Fp8Call
from lowq_kernels.gpu import capability
from lowq_kernels.products.dequant import SLAB_BYTES
from lowq_packers.errors import UnsupportedError
from lowq_packers.fp8 import Block, Fp8Matrix
from lowq_packers.layouts import PackedWeight

GROUP = 128  # values of a token that share a scale
WIDENED = "widened"  # the layout of a weight of blocks that is held in 16 bits, for want of FP8 hardware: words (N, K) floats


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies e4m3: NVIDIA from capability 8.9 on, with triton installed."""
    if not gpu.of(capability(device)).fp8:
        return False
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def activation_block(w: Fp8Matrix) -> Block:
    """How activations are quantized against these weights: groups of 128 against blocks, whole tokens against channels."""
    return (1, GROUP) if w.block[0] > 1 else (1, w.q.shape[1])


def matmul(x: torch.Tensor, w: Fp8Matrix, bias: torch.Tensor | None = None, act: Act = "fp8") -> torch.Tensor:
    """x (M, K) fp16 or bf16 @ W (N, K)^T + bias -> (M, N), x's dtype; x is rounded to fp8 on the way unless act is "none".

    Raises UnsupportedError on a device without FP8, and for int8 activations.
    """
    if not has_fp8(x.device) or act == "int8":
        raise UnsupportedError(f"fp8 weights with act={act} have no kernel on {x.device}")
    from lowq_kernels.fp8.block_quant import fp8_block_quant

    x = x.contiguous()
    return multiply(x if act == "none" else fp8_block_quant(x, activation_block(w)), w, bias, x.dtype)


@register(
    "fp8_widened",
    op="fp8_product",
    m_range=(0, 1 << 62),
    prefer=lambda call: call.widens,
    rank=30,
    refuse=lambda call: None if call.x_block is None else "takes activations in 16 bits",
)
def widened_product(
    x: torch.Tensor, w: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, config: Config
) -> torch.Tensor:
    """x (M, K) @ W^T + bias -> (M, N) in x's dtype: W widened to it a slab of rows at a time, then the library's product.

    What 16-bit activations take at large M; SLAB_BYTES of scratch (or as the config says), whatever the layer's size.
    """
    (N, K), rows = w.q.shape, w.block[0]
    y = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
    step = max(1, config.get("SLAB_BYTES", SLAB_BYTES) // (2 * K * rows)) * rows
    for n0 in range(0, N, step):
        part = slice(n0, min(n0 + step, N))
        slab = Fp8Matrix(w.q[part], w.scales[n0 // rows : -(-part.stop // rows)], w.block).dequantize(x.dtype)
        y[:, part] = torch.nn.functional.linear(x, slab, None if bias is None else bias[part].to(x.dtype))
    return y


def kernel_for(p: PackedWeight, act: Act) -> str:
    """The name of what multiplies one row by a weight of blocks."""
    if p.layout == WIDENED:
        return "torch (widened)"
    w = matrix(p)
    x_block = None if act == "none" else activation_block(w)
    return select(Fp8Call(1, p.N, p.K, x_block, w.block, torch.bfloat16, w.q.device.type, capability(w.q.device)))[0].name


def matrix(p: PackedWeight) -> Fp8Matrix:
    """A weight of blocks as kernels take it."""
    return Fp8Matrix(p.words, p.scales, p.scheme.block)


def widened(p: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight of blocks in 16 bits."""
    return replace(p, words=matrix(p).dequantize(dtype), layout=WIDENED)


def widened_linear(x: torch.Tensor, W: torch.Tensor, bias: torch.Tensor | None, act: Act) -> torch.Tensor:
    """x (M, K), rounded as `act` says, @ W (N, K)^T + bias -> (M, N) in x's dtype, by torch's own operations."""
    return torch.nn.functional.linear(rounded(x, act, GROUP), W.to(x.dtype), None if bias is None else bias.to(x.dtype))


def multiply(x: Fp8Matrix | torch.Tensor, w: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x (M, K), quantized or in 16 bits, @ W^T + bias -> (M, N) in `dtype`."""
    spec, config = select(Fp8Call.of(x, w, dtype))
    return spec.launch(x, w, bias, dtype, config)
