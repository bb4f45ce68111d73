"""Rows of a packed table as values: the look-up of a token embedding."""

import torch

from lowq_kernels.optional import optional
from lowq_packers.layouts import PackedWeight, get
from lowq_packers.qtensor import dequantized


def look_up(p: PackedWeight, ids: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    """The rows (..., K) of a table (V, K) at ids (...) int64, rounded to `dtype`, then times `factor`, rounded again.

    On CUDA with Triton this is one launch for the weights that it takes (`look_up_triton.takes`); elsewhere torch, 10 to 20.
    The numbers are the same. The table's layout has `rows`.
    """
    if not ids.numel():
        return torch.empty(*ids.shape, p.K, dtype=dtype, device=ids.device)
    kernel = optional("lowq_kernels.modules.look_up_triton", "triton") if ids.is_cuda else None
    if kernel is not None and kernel.takes(p) and not torch.compiler.is_compiling():
        return kernel.look_up(p, ids.reshape(-1), dtype, factor).reshape(*ids.shape, p.K)
    take = get(p.layout).rows
    assert take is not None
    rows = dequantized(p.scheme, *take(p, ids.reshape(-1)), p.table).to(dtype).reshape(*ids.shape, p.K)
    return rows if factor == 1.0 else rows * torch.full((), factor, dtype=dtype, device=rows.device)
