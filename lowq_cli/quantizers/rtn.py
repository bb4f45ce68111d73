"""Round to nearest: evenly spaced levels over each group's range. The fastest, and as good as any at 8 bits."""

import torch

from lowq_cli.quantizers import _tables
from lowq_cli.quantizers._slabs import Solution, encode, minmax, quantize_rows, store_scales, store_zeros
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

TABLES = True


def quantize(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None, table: torch.Tensor | None = None
) -> QuantizedTensor:
    """Round each group to the nearest of 2**bits evenly spaced levels over its range.

    Args:
        W: (N, K) float weight, any dtype and device; K a multiple of scheme.group_size.
        scheme: zero="float": levels from min to max; "int": the range is widened to include 0 and the zero is an integer
            code; "none": levels from about -max|w| to max|w|, spaced 2 max|w| / (2**bits - 1).
        dtype: storage dtype of scales and zeros; they are rounded to it before codes are chosen. None keeps fp32.
        table: for table schemes, the table or factor of the whole matrix, if W is only some of its rows; None: found from W.
    Returns:
        codes 0 .. 2**bits - 1; scales in weight units; zeros in code units. For "float" the error of a weight is at most
        scales / 2, up to the rounding of scale and zero to `dtype`. The same on CPU and GPU.
    Raises:
        SchemeError: shape or group size that does not fit. DamagedError: NaN or infinite weights.
    Source: asymmetric min-max, Jacob et al. 2017 (arXiv:1712.05877) section 2.1, with a float zero-point.
    """
    if scheme.table:
        return _tables.quantize_by_table(W, scheme, dtype, table, search=False)
    return quantize_rows(W, scheme, _solve, dtype)


def _solve(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None) -> Solution:
    scales, zeros = minmax(groups, scheme)
    rounded = store_scales(scales, dtype)
    if scheme.zero == "none":
        return encode(groups, rounded, scheme.mid, scheme.levels), rounded, None
    zeros = store_zeros(zeros * (scales / rounded), scheme, dtype)  # zeros that span the range with the rounded scale
    return encode(groups, rounded, zeros, scheme.levels), rounded, zeros
