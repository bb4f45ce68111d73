"""quantize_tensor: quantize one weight to codes and scales; the Python API of the quantizers."""

import torch

from lowq_cli import quantizers
from lowq_cli.quantizers._slabs import UNHELD, unheld
from lowq_packers.errors import SchemeError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme, ZeroKind


def quantize_tensor(
    W: torch.Tensor,
    bits: int = 4,
    group_size: int = 64,
    method: str = "auto",
    zero: ZeroKind = "float",
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Quantize one (N, K) weight.

    Args:
        W: (N, K) float weight on any device.
        bits, group_size, zero: the scheme; group_size = K means one scale per row.
        method: a name from `lowq_cli.quantizers`, or "auto" for the best measured method of this width.
        dtype: storage dtype of scales and zeros, which are rounded to it before the codes are chosen; None keeps fp32.
    Raises:
        SchemeError: a scheme that does not exist or does not fit K, scales that `dtype` cannot hold.
        UsageError: an unknown method. DamagedError: NaN or Inf.
    """
    scheme = Scheme(bits, group_size, zero)
    scheme.groups(W.shape[-1])
    chosen = quantizers.default_method(bits, group_size, zero) if method == "auto" else method
    q = quantizers.get(chosen)(W, scheme, dtype)
    if (lost := unheld(W, q, dtype)) and not lost <= UNHELD * float(W.double().square().sum()):
        then = "bfloat16 or float32" if dtype == torch.float16 else "float32"
        raise SchemeError(f"the weight's scales do not fit {str(dtype).removeprefix('torch.')}; use {then}")
    return q
