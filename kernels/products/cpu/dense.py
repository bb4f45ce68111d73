"""Layers that are not quantized on a CPU: a head that decoding reads whole at every step, a whole model, texts.

64 MB of weights take 2.4 ms at one row, the speed of the memory, and 7.5 at eight (Zen 4, two cores). Many rows are torch's,
in fp32 where the CPU has no 16-bit products that oneDNN uses: 66 ms for 512 rows of 2048 x 2048 on AVX2, in bf16 416.
"""

from functools import cache

import torch
from torch import nn

from lowq_kernels.products.cpu import native

HALVES = (torch.float16, torch.bfloat16)
MOST = 16  # max. rows for this library's code; for more, torch in fp32 is as fast
MOST_FP32 = 8  # the same for fp32: 8192 x 512 take 1.5 ms at 8 rows instead of torch's 2.0, at 16 3.0 instead of 2.1
ROUND = 8  # rows are padded to a multiple: oneDNN caches code for each number of rows, 0.6 MB for a small model's layers
SLAB_BYTES = 4 << 20  # bytes of weights that are converted to fp32 at a time


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) @ weight (N, K).T + bias (N,), all of one dtype and device: sums in fp32 on a CPU."""
    (M, K), N, exact = x.shape, weight.shape[0], x.dtype == torch.float32
    most = MOST_FP32 if exact else MOST
    other = x.device.type != "cpu" or x.dtype != weight.dtype or not (exact or x.dtype in HALVES)
    trained = x.requires_grad or (weight.requires_grad and torch.is_grad_enabled())
    if other or trained or torch.compiler.is_compiling():
        return nn.functional.linear(x, weight, bias)
    if most >= M and weight.is_contiguous() and native.library() is not None:
        y, x = torch.empty(M, N, dtype=x.dtype), x.contiguous()
        native.product({"x": x, "words": weight, "bias": bias, "y": y}, weight.dtype, M=M, N=N, K=K, bits=8 * weight.itemsize)
        return y
    if exact:
        return nn.functional.linear(x, weight, bias)
    if has_products(x.dtype):
        return nn.functional.linear(nn.functional.pad(x, (0, 0, 0, -M % ROUND)), weight, bias)[:M]
    y, x, rows = torch.empty(M, N, dtype=x.dtype), x.float(), max(1, SLAB_BYTES // (4 * K))
    for n in range(0, N, rows):
        part = slice(n, n + rows)
        y[:, part] = nn.functional.linear(x, weight[part].float(), None if bias is None else bias[part].float())
    return y


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype on this CPU; if not, torch uses slower loops."""
    if not torch.backends.mkldnn.is_available():
        return False
    ask = torch.ops.mkldnn._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else torch.ops.mkldnn._is_mkldnn_fp16_supported
    return bool(ask())
