"""Round to e4m3 with one scale per block, its largest magnitude / 448: the only method for fp8 weights."""

import torch

from lowq_packers import fp8
from lowq_packers.errors import DamagedError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


def quantize(W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> QuantizedTensor:
    """Quantize W (N, K), whole rows of blocks, with scales in fp32. Raises DamagedError for NaN or infinite weights."""
    matrix = fp8.quantize(W.float(), scheme.block)
    if not matrix.scales.isfinite().all():
        raise DamagedError("it holds NaN or infinite weights; the model file is damaged")
    return QuantizedTensor.of(scheme, matrix.q.view(torch.uint8), matrix.scales, None)
