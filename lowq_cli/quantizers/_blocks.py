"""Round to e4m3 under one scale for each block, its largest magnitude / 448: the one way to weights in fp8."""

import torch

from lowq_packers import fp8
from lowq_packers.errors import DamagedError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


def quantize(W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None) -> QuantizedTensor:
    """W (N, K) floats, whole rows of blocks. Raises DamagedError for NaN or infinite weights. Scales are fp32, not `dtype`."""
    found = fp8.quantize(W.float(), scheme.block)
    if not found.scales.isfinite().all():
        raise DamagedError("it holds NaN or infinite weights; the model file is damaged")
    return QuantizedTensor.of(scheme, found.q.view(torch.uint8), found.scales, None)
