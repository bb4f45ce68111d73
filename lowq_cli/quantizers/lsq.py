"""Least squares: codes alternate with the scale and zero that fit them best. The most accurate without data."""

from functools import cache
from typing import Any

import torch

from lowq_cli.quantizers import _tables
from lowq_cli.quantizers._slabs import (
    MAX_ZERO,
    Solution,
    encode,
    minmax,
    quantize_rows,
    smallest_scale,
    store_scales,
    store_zeros,
)
from lowq_kernels.optional import optional
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

TABLES = True
Grid = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# The search starts from several grids and refines the best: shares of the group's range, and the best uniform grid for a normal
# distribution, whose half-width is given in standard deviations (Max 1960, table II). Relative error of the base model, g64,
# with these four starts / with a fine scan of 15 ranges, which takes three times as long: 0.0838 / 0.0833 (4 bits),
# 0.1672 / 0.1678, 0.3220 / 0.3241, 0.5868 / 0.5875 (1 bit).
RANGES = (1.0, 0.85, 0.7)
SIGMAS = {8: 3.93, 4: 2.51, 3: 2.05, 2: 1.49, 1: 0.80}
TINY = 1e-30  # replaces the scale 0 of an all-zero group in divisions
ITERS = 6  # refinement steps; twice as many lower the error by less than 0.1%


def quantize(
    W: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None, table: torch.Tensor | None = None
) -> QuantizedTensor:
    """Minimise each group's squared error over codes, scale and zero together.

    Args:
        W: (N, K) float weight, any dtype and device; K a multiple of scheme.group_size.
        scheme: zero="float", "int" (the best of the integer zeros around the fitted one) or "none".
        dtype: storage dtype of scales and zeros. The scale is rounded first, the zero is fitted to the rounded scale
            and rounded, and codes are chosen for both. None keeps fp32.
        table: for table schemes, the table or factor of the whole matrix, if W is only some of its rows; None: found from W.
    Returns:
        codes 0 .. 2**bits - 1; scales in weight units; zeros in code units. Each group's squared error, before
        rounding to `dtype`, is at most that of rounding to the nearest over its range. CPU and GPU differ by the rounding
        of sums over a group.
    Raises:
        SchemeError: shape or group size that does not fit. DamagedError: NaN or infinite weights.
    Source: lowq's; the alternation is Lloyd's (1957, 1982) restricted to evenly spaced levels. The error is squared because
    p = 2 has the lowest perplexity of p = 1, 1.5, 2, 2.4, 3, 4 at 2 bits (docs/accuracy.md).
    """
    if scheme.table:
        return _tables.quantize_by_table(W, scheme, dtype, table, search=True)
    return quantize_rows(W, scheme, solve, dtype)


def solve(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None, weights: torch.Tensor | None = None) -> Solution:
    """The nearest codes of groups (N, G, g), with the scales and zeros of `fit_grid`."""
    scales, zeros = fit_grid(groups, scheme, dtype, weights)
    return encode(groups, scales, scheme.mid if zeros is None else zeros, scheme.levels), scales, zeros


def fit_grid(
    groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros (R, G), rounded to `dtype`, with the least squared error over groups (R, G, g).

    weights: (g,) or (G, g) positive weights of the squared errors within a group; None weighs all equally.
    On CUDA this is one launch of kernels/gptq/fit_grid_triton.py if Triton is installed and it takes the group size; elsewhere
    torch, several hundred small ops. Their sums differ by fp32 rounding.
    """
    kernel = implementation(groups.device.type)
    if kernel is None or groups.shape[-1] > kernel.MOST:
        return fit_grid_torch(groups, scheme, dtype, weights)
    constants = kernel.Search(RANGES[1:], SIGMAS[scheme.bits], ITERS, TINY, MAX_ZERO, scheme.mid, smallest_scale(dtype))
    return kernel.fit_grid_triton(groups, weights, scheme.bits, scheme.zero, dtype, constants)


@cache
def implementation(device: str) -> Any:
    """The module of the kernel that fits grids on a device of this type; None: torch does it."""
    return optional("lowq_kernels.gptq.fit_grid_triton", "triton") if device == "cuda" else None


def fit_grid_torch(
    groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fit_grid` on any device."""
    scales, zeros, center = _search(groups, scheme, weights)
    rounded = store_scales(torch.maximum(scales, groups.abs().amax(-1) / MAX_ZERO), dtype)
    if scheme.zero == "none":
        return rounded, None
    if scheme.zero == "float":  # set the zero so that the mean error is 0 for the rounded scale
        codes = encode(groups - center.unsqueeze(-1), scales.clamp(min=TINY), zeros, scheme.levels)
        zeros = _mean(codes, weights) - _mean(groups, weights) / rounded
    return rounded, store_zeros(zeros, scheme, dtype)


def _mean(t: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return t.sum(-1) / t.shape[-1] if weights is None else (t * weights).sum(-1) / weights.sum(-1)


def _search(groups: torch.Tensor, scheme: Scheme, weights: torch.Tensor | None) -> Grid:
    """(scales, zeros, center), (R, G) fp32 each: the best grid that the search finds for `groups - center`."""
    top = scheme.levels - 1
    scales, zeros = minmax(groups, scheme)
    center = torch.zeros_like(scales)
    if scheme.zero == "float":  # centered, so that sums of squares stay precise for groups far from 0
        center = (groups.amax(-1) + groups.amin(-1)) / 2
        groups, zeros = groups - center.unsqueeze(-1), torch.full_like(scales, top / 2)
    elif scheme.zero == "int":
        zeros = store_zeros(zeros, scheme, None)
    fit = _Fit(groups, scheme, weights)
    fit.consider(scales, zeros)
    for share in RANGES[1:]:
        fit.consider(scales * share, zeros)
    wide = (fit.rms * (2 * SIGMAS[scheme.bits] / top)).clamp(min=TINY)
    fit.consider(wide, zeros if scheme.zero == "none" else store_zeros(top / 2 - fit.mean / wide, scheme, None))
    for _ in range(ITERS):
        if not fit.consider(fit.scales, fit.zeros):
            break
    return fit.scales, fit.zeros, center


class _Fit:
    """The best scales and zeros so far for groups (R, G, g), with their squared errors in `loss`."""

    def __init__(self, groups: torch.Tensor, scheme: Scheme, weights: torch.Tensor | None) -> None:
        self.groups, self.scheme, self.weights = groups, scheme, weights
        self.size = groups.shape[-1] if weights is None else weights.sum(-1)
        self.codes = torch.empty_like(groups)
        self.weighted = groups if weights is None else groups * weights
        self.sum_w = self.weighted.sum(-1)
        self.sum_ww = torch.linalg.vecdot(self.weighted, groups)
        self.mean = self.sum_w / self.size
        square = self.sum_ww if scheme.zero == "none" else self.sum_ww - self.mean * self.sum_w
        self.rms = (square / self.size).clamp(min=0).sqrt()  # around the mean if the zero is free
        self.scales = self.zeros = self.loss = torch.full_like(self.sum_w, torch.inf)
        self.empty = True

    def consider(self, scales: torch.Tensor, zeros: torch.Tensor) -> bool:
        """Choose the nearest codes for this grid, fit scale and zero to them, and keep those that lower the error."""
        codes = torch.mul(self.groups, (1 / scales.clamp(min=TINY)).unsqueeze(-1), out=self.codes)
        codes.add_(zeros.unsqueeze(-1)).round_().clamp_(0, self.scheme.levels - 1)
        counted = codes if self.weights is None else codes * self.weights
        sum_q, sum_qq = counted.sum(-1), torch.linalg.vecdot(counted, codes)
        sum_qw = torch.linalg.vecdot(codes, self.weighted)
        if self.empty:  # first the start itself, which constant groups keep
            self.scales, self.zeros, self.empty = scales, zeros, False
        if self.scheme.zero == "float":
            return self._keep(*self._free_zero(sum_q, sum_qq, sum_qw))
        if self.scheme.zero == "none":
            return self._keep(*self._fixed_zero(zeros, sum_q, sum_qq, sum_qw))
        fitted, _, _ = self._free_zero(sum_q, sum_qq, sum_qw)
        free_zero = sum_q / self.size - self.mean / fitted
        below = free_zero.floor().clamp(0, self.scheme.levels - 2)
        better = False
        for zero in (below, below + 1, zeros):
            better |= self._keep(*self._fixed_zero(zero, sum_q, sum_qq, sum_qw))
        return better

    def _free_zero(self, sum_q: torch.Tensor, sum_qq: torch.Tensor, sum_qw: torch.Tensor) -> Grid:
        """Scale, zero and squared error of the regression of weights on codes."""
        spread = sum_qq - sum_q * sum_q / self.size
        slope = (sum_qw - sum_q * self.mean) / spread
        fits = (spread > 1e-6 * sum_qq) & (slope > 0)
        scales = torch.where(fits, slope, 1.0)
        loss = self.sum_ww - self.sum_w * self.mean - slope * slope * spread
        return scales, sum_q / self.size - self.mean / scales, torch.where(fits, loss, torch.inf)

    def _fixed_zero(self, zeros: torch.Tensor, sum_q: torch.Tensor, sum_qq: torch.Tensor, sum_qw: torch.Tensor) -> Grid:
        """Scale and squared error of the regression through `zeros`."""
        along = sum_qw - zeros * self.sum_w
        spread = sum_qq - 2 * zeros * sum_q + self.size * zeros * zeros
        fits = (along > 0) & (spread > 0)
        scales = torch.where(fits, along / spread, 1.0)
        return scales, zeros, torch.where(fits, self.sum_ww - scales * along, torch.inf)

    def _keep(self, scales: torch.Tensor, zeros: torch.Tensor, loss: torch.Tensor) -> bool:
        """Keep the grids that are better; return whether any was."""
        better = loss < self.loss
        self.scales = torch.where(better, scales, self.scales)
        self.zeros = torch.where(better, zeros, self.zeros)
        self.loss = torch.where(better, loss, self.loss)
        return bool(better.any())
