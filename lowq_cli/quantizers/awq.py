"""AWQ: large inputs get a finer step, by scales folded into what makes them; then least squares. Needs a calibration text."""

from functools import partial

import torch

from lowq_cli.quantizers._slabs import check_weight, quantize_rows
from lowq_cli.quantizers.gptq import Moments, correct_drift, damp
from lowq_cli.quantizers.lsq import solve
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

TEXT = True
SCALES = True  # `calibrate` folds the scales (scaling.py) into a layer before this sees its weights


def quantize(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None, moments: Moments | None = None
) -> QuantizedTensor:
    """Minimise each group's squared error, weighing columns by the power of their inputs, after correcting input drift.

    The range that a group's grid spans is searched with the grid (AWQ's clip search, with a free zero and in closed form).

    Args:
        W: (N, K) float weight, scaled already; any dtype and device; K a multiple of scheme.group_size.
        dtype: storage dtype of scales and zeros; both are rounded to it before codes are chosen. None keeps fp32.
        moments: of the inputs, on W's device; the diagonal weighs the columns. None weighs all equally, like lsq.
    Returns:
        codes 0 .. 2**bits - 1; scales in weight units; zeros in code units.
    Raises:
        SchemeError: shape or group size that does not fit, moments of another K. DamagedError: NaN or infinite weights.
    Source: AWQ (arXiv:2306.00978).
    """
    _, _, G = check_weight(W, scheme)
    weights = None
    if moments is not None:
        W = correct_drift(W, moments)
        weights = damp(moments).diagonal().reshape(G, -1)
    return quantize_rows(W, scheme, partial(solve, weights=weights), dtype)
