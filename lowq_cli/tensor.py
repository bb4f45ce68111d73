"""quantize_tensor: quantize one weight to codes and scales; the Python API of the quantizers."""

import torch

from lowq_cli import quantizers
from lowq_cli.quantizers._slabs import UNHELD, check_weight, unheld
from lowq_packers.errors import SchemeError, UsageError
from lowq_packers.qtensor import QuantizedTensor, float_dtype
from lowq_packers.scheme import Scheme, ZeroKind


def quantize_tensor(
    W: torch.Tensor,
    bits: int = 4,
    group_size: int = 64,
    method: str = "auto",
    zero: ZeroKind = "float",
    dtype: torch.dtype | str | None = None,
) -> QuantizedTensor:
    """Quantize one (N, K) weight.

    Args:
        W: (N, K) float weight on any device, such as the `weight` of an nn.Linear.
        bits, group_size, zero: the scheme; group_size = K means one scale per row.
        method: a name that `lowq quantize --help` lists, or "auto" for the best measured method of this width. Methods that
            read a text see none here: they take all inputs as independent and equally large.
        dtype: storage dtype of scales and zeros, which are rounded to it before the codes are chosen; None keeps fp32.
    Raises:
        SchemeError: a scheme that does not exist or does not fit K, scales that `dtype` cannot hold.
        UsageError: an unknown method or dtype, no tensor. DamagedError: NaN or Inf.
    """
    if not isinstance(W, torch.Tensor):
        raise UsageError(f"W must be a torch tensor, not {type(W).__name__}; torch.as_tensor makes one of an array")
    if W.is_meta:
        raise UsageError("W is on the meta device, which holds no values; load the weight first")
    scheme, W = Scheme(bits, group_size, zero), W.detach()
    dtype = None if dtype is None else float_dtype(dtype)
    check_weight(W, scheme)
    chosen = quantizers.default_method(bits, group_size, zero) if method == "auto" else method
    q = quantizers.get(chosen)(W, scheme, dtype)
    if (lost := unheld(W, q, dtype)) and not lost <= UNHELD * float(W.double().square().sum()):
        then = "bfloat16 or float32" if dtype == torch.float16 else "float32"
        raise SchemeError(f"the weight's scales do not fit {str(dtype).removeprefix('torch.')}; use {then}")
    return q
