"""dequant: dequantize a slab of rows, multiply by it with the library's dense matmul, next slab. Any device, any M.

The fallback where no fused kernel takes the call (fp16 and fp32 on the CPU, groups of 16 or 48), and the memory bound:
a slab holds at most SLAB_BYTES of dequantized weights, whatever the layer's size.
"""

import torch

from lowq_kernels.dispatch.registry import ANY_TABLE, Config, register
from lowq_kernels.products.cpu import dense
from lowq_packers import bitstream, tables
from lowq_packers.layouts import PackedWeight
from lowq_packers.qtensor import QuantizedTensor

SLAB_BYTES = 64 << 20


def dequantized_rows(p: PackedWeight, n0: int, n1: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows n0 .. n1 of a rowstream or strided weight as (n1 - n0, K) `dtype`."""
    s, table = p.scheme, tables.rows_of(p.table, p.N, n0, n1)
    if p.layout == "rowstream":
        words, scales = p.words[n0:n1], p.scales[n0:n1]
        zeros = None if p.zeros is None else p.zeros[n0:n1]
    else:
        words, scales = p.words[:, n0:n1].t(), p.scales[:, n0:n1].t()
        zeros = None if p.zeros is None else p.zeros[:, n0:n1].t()
    return QuantizedTensor.of(s, bitstream.unpack(words, s.bits, p.K), scales, zeros, table).dequantize(dtype)


@register(
    "dequant",
    layouts=("rowstream", "strided"),
    tables=ANY_TABLE,
    devices=("cpu", "cuda"),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    rank=500,
)
def dequant(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): weights rounded once to x's dtype, then `dense.product` per slab."""
    rows = max(1, SLAB_BYTES // (4 * p.K))
    if p.table is not None and p.table.shape[0] > 1:  # of the rows of one table, or of several whole ones
        each = p.N // p.table.shape[0]
        rows = max(rows // each * each, each)
    y = torch.empty(x.shape[0], p.N, dtype=x.dtype, device=x.device)
    for n0 in range(0, p.N, rows):
        n1 = min(n0 + rows, p.N)
        b = None if bias is None else bias[n0:n1].to(x.dtype)
        y[:, n0:n1] = dense.product(x, dequantized_rows(p, n0, n1, x.dtype), b)
    return y
