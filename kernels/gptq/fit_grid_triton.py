"""lsq.py's `fit_grid`, the search of each group's scale and zero, in one launch; torch takes several hundred.

Maths   codes q = clamp(round(w / s + z)) alternate with the s and z that minimise sum c (w - (q - z) s)^2 over a group, from
        four starts; then s is rounded to the storage dtype, and z is fitted to the rounded s and rounded
Shapes  groups (R, G, g) fp32, weights c (g,) or (G, g) -> scales, zeros (R, G) fp32
Grid    (cdiv(R G, BLOCK_R),): one program = some groups, which stay in registers; groups do not depend on each other
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lowq_kernels.gptq.groups_triton import MOST as MOST  # asked of every implementation
from lowq_kernels.gptq.groups_triton import ROUNDER, VALUES, operands, read, stored
from lowq_kernels.rounding_triton import DTYPES

NONE, INT, FLOAT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of zeros
KINDS = {"none": 0, "int": 1, "float": 2}


class Search(NamedTuple):
    """Constants of the search, which lsq.py defines.

    shares: the second and the third start's share of a group's range. sigma: half-width of the last start in standard
    deviations. iters: refinement steps. tiny: replaces the scale 0. max_zero: max. |zero|. mid: the zero of the kind "none".
    smallest: the smallest stored scale.
    """

    shares: tuple[float, float]
    sigma: float
    iters: int
    tiny: float
    max_zero: float
    mid: float
    smallest: float


@triton.jit
def _rounded(x, HIGH: tl.constexpr):
    """x clamped to 0 .. HIGH and rounded to the nearest whole number."""
    return (tl.minimum(tl.maximum(x, 0.0), HIGH) + ROUNDER) - ROUNDER


@triton.jit
def _free_zero(sum_q, sum_qq, sum_qw, size, mean):
    """Slope and spread of the regression of weights on codes, and where it fits."""
    spread = sum_qq - sum_q * tl.div_rn(sum_q, size)
    fits = spread > 1e-6 * sum_qq
    slope = tl.div_rn(sum_qw - sum_q * mean, tl.where(fits, spread, 1.0))
    fits = fits & (slope > 0)
    return tl.where(fits, slope, 1.0), spread, fits


@triton.jit
def _keep(best_s, best_z, least, s, z, loss):
    """The grids that are better."""
    better = loss < least
    return tl.where(better, s, best_s), tl.where(better, z, best_z), tl.where(better, loss, least)


@triton.jit
def _fixed_zero(best_s, best_z, least, z, sum_q, sum_qq, sum_qw, sum_w, sum_ww, size):
    """Keep the regression through z where it is better."""
    along = sum_qw - z * sum_w
    spread = sum_qq - 2 * z * sum_q + size * z * z
    fits = (along > 0) & (spread > 0)
    s = tl.where(fits, tl.div_rn(along, tl.where(fits, spread, 1.0)), 1.0)
    return _keep(best_s, best_z, least, s, z, tl.where(fits, sum_ww - s * along, float("inf")))


@triton.jit
def _consider(
    w, c, s, z, best_s, best_z, least, sum_w, sum_ww, size, mean, TOP: tl.constexpr, KIND: tl.constexpr, TINY: tl.constexpr
):
    """Fit scale and zero to the nearest codes for the grid (s, z), and keep them where they lower the error."""
    q = _rounded(w * tl.div_rn(1.0, tl.maximum(s, TINY))[:, None] + z[:, None], TOP)
    counted = q * c
    sum_q, sum_qq, sum_qw = tl.sum(counted, 1), tl.sum(counted * q, 1), tl.sum(counted * w, 1)
    if KIND == NONE:
        best_s, best_z, least = _fixed_zero(best_s, best_z, least, z, sum_q, sum_qq, sum_qw, sum_w, sum_ww, size)
    else:
        slope, spread, fits = _free_zero(sum_q, sum_qq, sum_qw, size, mean)
        free = tl.div_rn(sum_q, size) - tl.div_rn(mean, slope)
        if KIND == FLOAT:
            loss = tl.where(fits, sum_ww - sum_w * mean - slope * slope * spread, float("inf"))
            best_s, best_z, least = _keep(best_s, best_z, least, slope, free, loss)
        else:
            below = tl.minimum(tl.maximum(tl.floor(free), 0.0), TOP - 1)
            best_s, best_z, least = _fixed_zero(best_s, best_z, least, below, sum_q, sum_qq, sum_qw, sum_w, sum_ww, size)
            best_s, best_z, least = _fixed_zero(best_s, best_z, least, below + 1, sum_q, sum_qq, sum_qw, sum_w, sum_ww, size)
            best_s, best_z, least = _fixed_zero(best_s, best_z, least, z, sum_q, sum_qq, sum_qw, sum_w, sum_ww, size)
    return best_s, best_z, least


@triton.jit
def _fit_grid_kernel(
    groups_ptr, weights_ptr, scales_ptr, zeros_ptr, count, G, SIZE, stride_row, stride_group, stride_weight,
    TOP: tl.constexpr, KIND: tl.constexpr, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr, LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, SIGMA: tl.constexpr, ITERS: tl.constexpr,
    TINY: tl.constexpr, MAX_ZERO: tl.constexpr, MID: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    at, _, inside, mask, w, c = read(
        groups_ptr, weights_ptr, count, G, SIZE, stride_row, stride_group, stride_weight, WEIGHTED, BLOCK_R, BLOCK_B
    )
    lo = tl.min(tl.where(inside, w, float("inf")), 1)
    hi = tl.max(tl.where(inside, w, float("-inf")), 1)
    absmax = tl.maximum(hi, -lo)
    size = tl.sum(c, 1)
    mean_w = tl.div_rn(tl.sum(w * c, 1), size)
    # the first start spans the group's range, as `_slabs.minmax` defines it
    if KIND == NONE:
        s = absmax * (2 / TOP if TOP == 1 else tl.where(lo == hi, 1.0, 2 / TOP))
        z = tl.full((BLOCK_R,), MID, tl.float32)
    elif KIND == INT:
        low, high = tl.minimum(lo, 0.0), tl.maximum(hi, 0.0)
        s = tl.maximum(tl.div_rn(high - low, TOP + 0.0), absmax * (1 / MAX_ZERO))
        z = _rounded(tl.where(s > 0, tl.div_rn(-low, tl.where(s > 0, s, 1.0)), 0.0), TOP)
    else:  # centered, so that sums of squares stay precise for groups far from 0
        s = tl.maximum(tl.div_rn(hi - lo, TOP + 0.0), absmax * (1 / MAX_ZERO))
        z = tl.full((BLOCK_R,), TOP / 2, tl.float32)
        w = tl.where(mask, w - ((hi + lo) * 0.5)[:, None], 0.0)
    sum_w, sum_ww = tl.sum(w * c, 1), tl.sum(w * c * w, 1)
    mean = tl.div_rn(sum_w, size)
    square = sum_ww if KIND == NONE else sum_ww - mean * sum_w
    rms = tl.sqrt_rn(tl.maximum(tl.div_rn(square, size), 0.0))
    best_s, best_z, loss = s, z, tl.full((BLOCK_R,), float("inf"), tl.float32)  # constant groups keep the first start
    wide = tl.maximum(rms * (2 * SIGMA / TOP), TINY)
    middle = z
    if KIND != NONE:
        middle = TOP / 2 - tl.div_rn(mean, wide)
    if KIND == INT:
        middle = _rounded(middle, TOP)
    for i in range(4 + ITERS):  # a group that stops to improve stays as it is
        this_s = tl.where(i == 0, s, tl.where(i == 1, s * SECOND, tl.where(i == 2, s * THIRD, tl.where(i == 3, wide, best_s))))
        this_z = tl.where(i < 3, z, tl.where(i == 3, middle, best_z))
        best_s, best_z, loss = _consider(w, c, this_s, this_z, best_s, best_z, loss, sum_w, sum_ww, size, mean, TOP, KIND, TINY)
    rounded = stored(tl.maximum(tl.maximum(best_s, absmax * (1 / MAX_ZERO)), SMALLEST), LIMIT, DTYPE)
    tl.store(scales_ptr + at, rounded, mask=at < count)
    if KIND == FLOAT:  # the zero with which the mean error is 0 for the rounded scale
        q = _rounded(tl.div_rn(w, tl.maximum(best_s, TINY)[:, None]) + best_z[:, None], TOP)
        best_z = stored(tl.div_rn(tl.sum(q * c, 1), size) - tl.div_rn(mean_w, rounded), LIMIT, DTYPE)
    if KIND != NONE:
        tl.store(zeros_ptr + at, best_z, mask=at < count)


def fit_grid_triton(
    groups: torch.Tensor, weights: torch.Tensor | None, bits: int, zero: str, dtype: torch.dtype | None, search: Search
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As lsq.py's `fit_grid`, for groups of up to MOST fp32 weights; the same result on every run."""
    groups, weights, sizes = operands(groups, weights)
    scales = groups.new_empty(groups.shape[:2])
    zeros = None if zero == "none" else torch.empty_like(scales)
    if not scales.numel():
        return scales, zeros
    block = triton.next_power_of_2(groups.shape[2])
    rows = max(1, VALUES // max(block, 64))
    with torch.cuda.device_of(groups):  # Triton launches on the current device
        _fit_grid_kernel[(triton.cdiv(scales.numel(), rows),)](
            groups, groups if weights is None else weights, scales, scales if zeros is None else zeros, *sizes,
            TOP=(1 << bits) - 1, KIND=KINDS[zero], WEIGHTED=weights is not None, DTYPE=DTYPES[dtype],
            LIMIT=torch.finfo(dtype or torch.float32).max, SMALLEST=search.smallest,
            SECOND=search.shares[0], THIRD=search.shares[1], SIGMA=search.sigma, ITERS=search.iters,
            TINY=search.tiny, MAX_ZERO=search.max_zero, MID=search.mid,
            BLOCK_R=rows, BLOCK_B=block, num_warps=4, enable_fp_fusion=False,  # each result is rounded, as torch's are
        )  # fmt: skip
    return scales, zeros
