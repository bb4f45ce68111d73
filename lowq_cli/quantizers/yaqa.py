"""gptq whose rows, too, make up for each other's errors, as the KL divergence weighs them. Needs a calibration text."""

from collections.abc import Sequence

import torch

from lowq_cli.quantizers.gptq import Moments, rounder
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

TABLES = True
TEXT = True
CARRIES = True
CURVATURE = True  # `calibrate` first measures the moments of calibrate/curvature.py
# Max. steps in which the rows of a block are rounded; rows of one step do not compensate each other's errors. Base, 4 bits g64,
# KL on WikiText-2 / mix: gptq 0.0353 / 0.0384; 64 rows per step (8 to 22 steps) 0.0328 / 0.0357; 16 rows per step (32 to 88
# steps) 0.0317 / 0.0350. Each step takes as many launches as gptq.
STEPS = 32
FEWEST = 16  # min. rows per step


def quantize(
    W: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype | None = None,
    moments: Moments | None = None,
    table: torch.Tensor | None = None,
    outputs: Sequence[torch.Tensor] | None = None,
    fewest: int = FEWEST,
) -> QuantizedTensor:
    """Minimise tr(H_O E H_I E^T) greedily for the error E (N, K), row by row; within a row, columns have gptq's order.

    Args, besides those of `gptq.quantize`:
        outputs: H_O as blocks of rows (n, n), positive definite, N rows in total, on any device. None: the identity, i.e. gptq.
        fewest: min. rows per step.
    Returns and errors are those of `gptq.quantize`; where H_O is diagonal, so are the codes.
    Source: YAQA (arXiv:2505.22988), in steps of rows. With H_O = U D U^T and U unit upper triangular, the cost of row i is D_i
    times the rounding cost of w_i + sum over earlier rows k of U_ki e_k; gptq rounds this sum instead of w_i.
    """
    W, rounded = rounder(W, scheme, dtype, moments, table)
    if outputs is None:
        return rounded(W)
    W = W.float()
    sides, at = [], 0
    for H in outputs:
        sides.append(_Side(H.to(W.device), at, fewest))
        at += len(H)
    assert at == len(W), (at, len(W))
    errors, parts, order = torch.zeros_like(W), [], []
    for step in range(max(len(s.order) for s in sides)):
        rows = [s.rows(step) for s in sides]
        order.append(torch.cat(rows))
        q = rounded(torch.cat([s.target(W, errors, step) for s in sides]))
        errors[order[-1]] = W[order[-1]] - q.dequantize()
        parts.append(q)
    back = torch.cat(order).argsort()

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors)[back]

    zeros = None if parts[0].zeros is None else joined([q.zeros for q in parts if q.zeros is not None])
    return QuantizedTensor.of(scheme, joined([q.W_q for q in parts]), joined([q.scales for q in parts]), zeros, parts[0].table)


class _Side:
    """A block of rows from row `first` on. order: row indices per step, those with the most costly errors first."""

    def __init__(self, H: torch.Tensor, first: int, fewest: int) -> None:
        order = H.diagonal().argsort(descending=True, stable=True)
        upper = torch.linalg.cholesky(H[order][:, order].flip(0, 1)).flip(0, 1)  # H = upper upper^T
        self.factor = upper / upper.diagonal()
        self.size = max(fewest, -(-len(H) // STEPS))
        self.order = (order + first).split(self.size)

    def rows(self, step: int) -> torch.Tensor:
        """The row indices of a step; empty if the block has fewer steps."""
        return self.order[step] if step < len(self.order) else self.order[0][:0]

    def target(self, W: torch.Tensor, errors: torch.Tensor, step: int) -> torch.Tensor:
        """The values to round instead of a step's rows of W, which compensate the errors of the steps before."""
        rows = W[self.rows(step)]
        if step == 0 or not len(rows):
            return rows
        at = step * self.size
        return rows + self.factor[:at, at : at + len(rows)].T @ errors[torch.cat(self.order[:step])]
