"""GPTQ: columns are rounded one after the other, and those still to come make up for the error. Needs a calibration text."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from lowq_cli.quantizers import GPTQ_SLAB
from lowq_cli.quantizers._slabs import Solution, check_weight, quantize_rows
from lowq_cli.quantizers._table_book import Book
from lowq_cli.quantizers._table_fit import companion_of
from lowq_cli.quantizers.lsq import fit_grid
from lowq_kernels.gptq.round_block import carry, round_block
from lowq_packers.errors import SchemeError
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

Nearest = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
TABLES = True
TEXT = True
CARRIES = True  # later columns compensate errors: sensitivities for a bit budget count that
BLOCK = 128  # columns that are rounded before one matmul corrects the rest of the row
# Added to the second moments' diagonal, relative to its mean, against chance correlations in the calibration text. Base model,
# 2 bits g64, 79k calibration tokens: perplexity on WikiText-2 56.96 at 0.1, 57.86 at 0.3 (16k tokens: 60.63 at 0.03).
DAMP = 0.1
# Correlations of K inputs, measured with T tokens, are shrunk by the factor T / (T + SHRINK K). One matrix of the base model
# (down, K=1408), 2 bits g64, relative error on another text: with 128 tokens 0.118 at 0, 0.0905 at 2, 0.0903 at 4 (lsq 0.0922);
# with 16k tokens 0.0895, 0.0883, 0.0871. gptq does not shrink from ENOUGH tokens per input on: with 46 to 256 tokens per input
# whole models were no better (perplexity on WikiText-2 / mix: base, 3 bits, 38.05 / 43.54 at 0, 38.64 / 43.50 at 2; story,
# 2 bits, 67.94 / 74.47 at 0, 75.44 / 74.10 at 2).
SHRINK, ENOUGH = 2, 32
# Share of the input drift that a layer compensates (GPTAQ uses 1). Perplexity: 56.96 at 0, 52.43 at 0.5, 52.58 at 1.
ALPHA = 0.5


@dataclass
class Moments:
    """Moments of a layer's inputs on the calibration text: x in the original model, x' in the so far quantized model.

    second: (K, K) sum over tokens of x' x'^T, the Hessian H = X X^T of the GPTQ paper, before damping. drift: (K, K) sum of
    (x - x') x'^T, or None. tokens: number; 0: no shrinking.
    """

    second: torch.Tensor
    drift: torch.Tensor | None = None
    tokens: int = 0


def quantize(
    W: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype | None = None,
    moments: Moments | None = None,
    grid: QuantizedTensor | None = None,
    table: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Minimise ||W X - dequantized X'||^2 greedily, column by column.

    Groups are rounded in descending order of their inputs' power, and columns within a group likewise. A group's grid is fitted
    to the weights corrected so far, each column weighted by the cost of its error. Codes stay at their columns' places, so that
    kernels need no permutation.

    Args:
        W: (N, K) float weight, any dtype and device; K a multiple of scheme.group_size.
        dtype: storage dtype of scales and zeros; both are rounded to it before the group's columns are. None keeps fp32.
        moments: of the inputs, on W's device. None: independent inputs of equal power; the result is then that of lsq.
        grid: a tensor (N, K) of `scheme` on W's device: its scales, zeros and table are kept, and only codes are chosen.
        table: for table schemes, the table or factor of the whole matrix, if W is only some of its rows; None: found from W.
    Returns:
        codes 0 .. 2**bits - 1; scales in weight units; zeros in code units.
    Raises:
        SchemeError: shape or group size that does not fit, moments of another K. DamagedError: NaN or infinite weights.
    Source: GPTQ (arXiv:2210.17323); the drift term is from GPTAQ (arXiv:2504.02692), the order of groups is GPTQModel's GAR.
    """
    if grid is None:
        W, rounded = rounder(W, scheme, dtype, moments, table)
        return rounded(W)
    W, path = _corrected(W, scheme, moments)
    K, book = W.shape[1], Book(scheme, grid.table, W.device, dtype) if scheme.table else None
    step, codes = max(1, GPTQ_SLAB // K), []
    for i in range(0, len(W), step):
        grid_rows = grid.rows(i, min(i + step, len(W)))
        codes.append(
            quantize_rows(W[i : i + step], scheme, partial(_solve, path, grid_rows, book), None, W.numel(), grid_rows.table).W_q
        )
    return replace(grid, W_q=torch.cat(codes))


def rounder(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None, moments: Moments | None, table: torch.Tensor | None
) -> tuple[torch.Tensor, Callable[[torch.Tensor], QuantizedTensor]]:
    """W (N, K) corrected for its inputs' drift, and a function that rounds rows (R, K) of it. Arguments: see `quantize`."""
    W, path = _corrected(W, scheme, moments)
    table = companion_of(W, scheme) if table is None else table
    book = Book(scheme, table, W.device, dtype) if scheme.table else None
    return W, lambda rows: quantize_rows(rows, scheme, partial(_solve, path, None, book), dtype, GPTQ_SLAB, table)


def codes_on(W: torch.Tensor, moments: Moments, size: int, nearest_in: Callable[[int], Nearest]) -> torch.Tensor:
    """Codes (N, K) uint8 of W, rounded column by column as in `quantize`, on another format's grids of `size` columns.

    nearest_in: takes a group's index; returns a function that rounds a column (N,) of the group to codes and their values.
    """
    W, path = _corrected(W, Scheme(8, size), moments)
    left = W.float()[:, path.order]
    codes, nearest_in = torch.empty_like(left), cache(nearest_in)
    for first in range(0, left.shape[1], BLOCK):
        last = min(first + BLOCK, left.shape[1])
        groups = iter((path.order[first:last] // size).tolist())
        part = left[:, first:last], path.factor[first:last, first:last]
        codes[:, first:last], errors = carry(*part, lambda column, groups=groups: nearest_in(next(groups))(column))  # type: ignore[misc]
        left[:, last:].addmm_(errors, path.factor[first:last, last:], alpha=-1)
    back = torch.empty_like(codes)
    back[:, path.order] = codes
    return back.to(torch.uint8)


def _corrected(W: torch.Tensor, scheme: Scheme, moments: Moments | None) -> tuple[torch.Tensor, "_Path"]:
    """W (N, K) corrected for the drift of its inputs, and the `_Path` over its columns."""
    _, K, G = check_weight(W, scheme)
    if moments is None:
        return W, _Path.straight(K, W.device)
    if moments.tokens >= ENOUGH * K:
        moments = replace(moments, tokens=0)
    return correct_drift(W, moments), _Path.of(damp(moments), G)


def correct_drift(W: torch.Tensor, moments: Moments) -> torch.Tensor:
    """W (N, K) + ALPHA W drift second^-1, which compensates the share ALPHA of the inputs' drift (GPTAQ).

    Raises SchemeError for moments of another K than W's.
    """
    if moments.second.shape != (K := W.shape[1], K):
        raise SchemeError(f"moments are of {moments.second.shape[0]} inputs, the weight has K={K}")
    if moments.drift is None:
        return W
    W = W.float()
    return W + ALPHA * torch.cholesky_solve((W @ moments.drift.float()).T, torch.linalg.cholesky(damp(moments))).T


def damp(moments: Moments) -> torch.Tensor:
    """Second moments (K, K) in fp32, shrunk and damped to be invertible; inputs that are always 0 get the mean power."""
    damped = moments.second.float().clone()
    diagonal = damped.diagonal()
    before = diagonal.clone()
    if moments.tokens:
        damped *= moments.tokens / (moments.tokens + SHRINK * len(before))
    alive = before > 0
    mean = before[alive].mean() if alive.any() else torch.ones((), device=before.device)
    diagonal.copy_(torch.where(alive, before + DAMP * mean, mean))
    return damped


def column_costs(moments: Moments) -> torch.Tensor:
    """Costs (K,) in squared output of a rounding error of 1 in each column, after later columns have compensated it."""
    path = _Path.of(damp(moments), 1)
    costs = torch.empty_like(path.factor.diagonal())
    costs[path.order] = path.costs
    return costs


@dataclass(frozen=True)
class _Path:
    """The order in which columns are rounded, and the effect of a column's error on later columns.

    order: (K,) column indices, group by group. factor: (K, K) upper Cholesky factor of the inverse moments.
    """

    order: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, damped: torch.Tensor, G: int) -> "_Path":
        power = damped.diagonal().reshape(G, -1)
        groups = power.mean(-1).argsort(dim=-1, descending=True, stable=True)
        inside = power.argsort(dim=-1, descending=True, stable=True)
        order = (groups.unsqueeze(-1) * power.shape[1] + inside[groups]).reshape(-1)
        ordered = damped[order][:, order]
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(ordered))
        return cls(order, torch.linalg.cholesky(inverse, upper=True))

    @property
    def costs(self) -> torch.Tensor:
        """Costs (K,) of an error of 1 in each column, in this order, in units of the output's squared error."""
        return self.factor.diagonal().square().reciprocal()

    @classmethod
    def straight(cls, K: int, device: torch.device) -> "_Path":
        return cls(torch.arange(K, device=device), torch.eye(K, device=device))


def _solve(
    path: _Path,
    grid: QuantizedTensor | None,
    book: Book | None,
    groups: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype | None,
) -> Solution:
    """Codes (R, G, g), scales and zeros of a slab of rows; scales and zeros are those of `grid`, if given, or fitted."""
    R, G, size = groups.shape
    factor, cost, K = path.factor, path.costs, G * size
    left = groups.reshape(R, K)[:, path.order]
    codes = torch.empty_like(left)
    if grid is None:
        scales = torch.empty(R, G, device=left.device, dtype=torch.float32 if scheme.scale == "float" else torch.uint8)
    elif book:
        scales = grid.scales
    else:
        scales = torch.where(grid.scales == 0, 1.0, grid.scales.float())  # replaces the scale of a group of zeros
    zeros = torch.full((R, G), scheme.mid, device=left.device) if grid is None or grid.zeros is None else grid.zeros.float()
    owner = (path.order[::size] // size).tolist()
    for step, group in enumerate(owner):
        start, end = step * size, (step + 1) * size
        now, here = left[:, start:end].unsqueeze(1), scales[:, group : group + 1]
        if book:
            stored, values = book.scales(now, cost[start:end]) if grid is None else (here, book.wide(here))
            here.copy_(stored)
            wide = values[:, 0]
        else:
            if grid is None:
                s, z = fit_grid(now, scheme, dtype, cost[start:end])
                here.copy_(s)
                if z is not None:
                    zeros[:, group] = z[:, 0]
            wide = here[:, 0]
        for first in range(start, end, BLOCK):
            last = min(first + BLOCK, end)
            part = left[:, first:last], factor[first:last, first:last]
            if book:
                block, errors = book.round_block(*part, wide)
            else:
                block, errors = round_block(*part, wide, zeros[:, group], scheme.levels)
            codes[:, first:last] = block
            left[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    back = torch.empty_like(codes)
    back[:, path.order] = codes
    return back.reshape(R, G, size), scales, None if scheme.zero == "none" else zeros
