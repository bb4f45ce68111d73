"""_table_book.py's search of each group's scale for a table of values, in one launch; torch takes 116 to 784.

Maths   a scale s is tried with the nearest values q: sum c (w - q s)^2 over a group; the first with the least is kept, then -s
        with the table's mirror image where scales have signs. Float scales: from each start, the s with the least error for the
        codes of the one before, rounded to the storage dtype. Byte scales: the neighbours of the one that reaches the group's
        largest weight
Shapes  groups (R, G, g) fp32, weights c (g,) or (G, g) -> scales (R, G), in their stored form and in fp32, codes (R, G, g)
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
from lowq_kernels.gptq.table_triton import loaded, nearest
from lowq_kernels.rounding_triton import DTYPES

FLOAT, E4M3, E8M0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of scales
KINDS = {"float": 0, "e4m3": 1, "e8m0": 2}


class Search(NamedTuple):
    """A table and the constants of the search, which _table_book.py defines.

    values, codes: sorted values (L,) fp32 and their codes. factor: one number that multiplies byte scales, or None. scale: the
    kind. dtype: of float scales; None: fp32. mirrored: scales of both signs are tried. shares, fits: starts of a float scale,
    tries from each. tried: steps from the first byte. limits: the smallest and the largest byte. smallest: the smallest float
    scale. tiny: replaces the scale 0. sign: the bit that makes a byte negative.
    """

    values: torch.Tensor
    codes: torch.Tensor
    factor: torch.Tensor | None
    scale: str
    dtype: torch.dtype | None
    mirrored: bool
    shares: tuple[float, ...]
    fits: int
    tried: range
    limits: tuple[int, int]
    smallest: float
    tiny: float
    sign: int


@triton.jit
def _exponent(x):
    """The biased exponents of positive floats."""
    return (x.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)


@triton.jit
def _power(exponent):
    """2 ** (exponent - 127)"""
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)  # 2**-127 is a subnormal of fp32


@triton.jit
def _to_e4m3(x):
    """The bytes of the nearest e4m3 numbers, at least the smallest; of two the even one."""
    x = tl.minimum(tl.maximum(x, 0.001953125), 448.0)
    exponent = tl.maximum(_exponent(x), 121)  # below 2**-6 steps stay 2**-9
    steps = (tl.div_rn(x, _power(exponent - 3)) + ROUNDER) - ROUNDER
    return (exponent - 121) * 8 + steps.to(tl.int32)


@triton.jit
def _from_e4m3(byte):
    exponent = byte >> 3
    steps = tl.where(exponent == 0, byte, 8 + (byte & 7))
    return steps.to(tl.float32) * _power(tl.maximum(exponent, 1) + 117)


@triton.jit
def _from_byte(byte, KIND: tl.constexpr):
    """The values of byte scales."""
    return _from_e4m3(byte) if KIND == E4M3 else _power(byte)


@triton.jit
def _first_byte(top, most, factor, KIND: tl.constexpr):
    """The byte scale that reaches the largest weight; for e8m0 from exponents, as in the OCP standard, section 6.3."""
    if KIND == E4M3:
        return _to_e4m3(tl.div_rn(tl.div_rn(top, most), factor))
    return tl.minimum(tl.maximum(_exponent(top) - _exponent(most) + 127, 0), 254)


@triton.jit
def _fit_scales_kernel(
    groups_ptr, weights_ptr, values_ptr, codes_ptr, factor_ptr, scales_ptr, wide_ptr, q_ptr,
    count, G, SIZE, stride_row, stride_group, stride_weight,
    KIND: tl.constexpr, LEVELS: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, MIRRORED: tl.constexpr,
    DTYPE: tl.constexpr, LIMIT: tl.constexpr, SMALLEST: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, TRIES: tl.constexpr, FITS: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr,
    LAST: tl.constexpr, TINY: tl.constexpr, SIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    at, cols, _, mask, w, c = read(
        groups_ptr, weights_ptr, count, G, SIZE, stride_row, stride_group, stride_weight, WEIGHTED, BLOCK_R, BLOCK_B
    )
    values = loaded(values_ptr, LEVELS)
    factor = 1.0
    if SCALED:
        factor = tl.load(factor_ptr)
    top, most = tl.max(tl.abs(w), 1), tl.maximum(tl.abs(values[0]), tl.abs(values[LEVELS - 1]))
    if KIND == FLOAT:
        first = stored(tl.maximum(tl.div_rn(top, most), SMALLEST), LIMIT, DTYPE)
        wide = first
    else:
        first = _first_byte(top, most, factor, KIND)
        wide = tl.zeros_like(top)
    best, best_sign = first, tl.full((BLOCK_R,), 1.0, tl.float32)
    least = tl.full((BLOCK_R,), float("inf"), tl.float32)
    for i in range(TRIES * (1 + MIRRORED)):
        sign = tl.where(i < TRIES, 1.0, -1.0)
        if KIND == FLOAT:
            start = i // FITS % 3
            share = tl.where(start == 0, 1.0, tl.where(start == 1, SECOND, THIRD))
            wide = tl.where(i % FITS == 0, stored(tl.maximum(first * share, SMALLEST), LIMIT, DTYPE), wide)
            now = wide
        else:
            now = tl.minimum(tl.maximum(first + (STEP + i % TRIES), LEAST), LAST)
            wide = _from_byte(now, KIND) * factor
        this = w * sign
        q = nearest(tl.div_rn(this, tl.maximum(wide, TINY)[:, None]), values, values, LEVELS)
        error = this - q * wide[:, None]
        loss = tl.sum(error * error * c, 1)
        better = loss < least
        least, best = tl.where(better, loss, least), tl.where(better, now, best)
        best_sign = tl.where(better, sign, best_sign)
        if KIND == FLOAT:
            along, spread = tl.sum(this * c * q, 1), tl.sum(q * c * q, 1)
            fits = (along > 0) & (spread > 0)
            fitted = tl.where(fits, tl.div_rn(along, tl.where(fits, spread, 1.0)), wide)
            wide = stored(tl.maximum(fitted, SMALLEST), LIMIT, DTYPE)
    wide = best if KIND == FLOAT else _from_byte(best, KIND) * factor
    tl.store(wide_ptr + at, wide * best_sign, mask=at < count)
    if KIND != FLOAT:
        tl.store(scales_ptr + at, tl.where(best_sign < 0, best | SIGN, best).to(tl.uint8), mask=at < count)
    x = tl.div_rn(w * best_sign[:, None], tl.maximum(wide, TINY)[:, None])
    codes = nearest(x, values, loaded(codes_ptr, LEVELS), LEVELS)
    tl.store(q_ptr + at.to(tl.int64)[:, None] * SIZE + cols[None, :], codes.to(tl.uint8), mask=mask)


def fit_scales_triton(
    groups: torch.Tensor, weights: torch.Tensor | None, search: Search
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored scales, their values in fp32 and codes (uint8) of groups of up to MOST fp32 weights.

    The same result on every run. One kernel for callers that need the codes and those that do not: compiled without them, its
    sums run in another order and fp32 scales differ in their last bit (H200).
    """
    groups, weights, sizes = operands(groups, weights)
    wide = scales = groups.new_empty(groups.shape[:2])
    if search.scale != "float":
        scales = torch.empty_like(wide, dtype=torch.uint8)
    q = torch.empty(groups.shape, dtype=torch.uint8, device=groups.device)
    if not wide.numel():
        return scales, wide, q
    block = max(16, triton.next_power_of_2(groups.shape[2]))
    rows = max(1, VALUES // block)
    with torch.cuda.device_of(groups):  # Triton launches on the current device
        _fit_scales_kernel[(triton.cdiv(wide.numel(), rows),)](
            groups, groups if weights is None else weights, search.values, search.codes,
            wide if search.factor is None else search.factor, scales, wide, q,
            *sizes,
            KIND=KINDS[search.scale], LEVELS=len(search.values), WEIGHTED=weights is not None,
            SCALED=search.factor is not None, MIRRORED=int(search.mirrored), DTYPE=DTYPES[search.dtype],
            LIMIT=torch.finfo(search.dtype or torch.float32).max, SMALLEST=search.smallest,
            SECOND=search.shares[1], THIRD=search.shares[2], FITS=search.fits,
            TRIES=3 * search.fits if search.scale == "float" else len(search.tried),
            STEP=search.tried.start, LEAST=search.limits[0], LAST=search.limits[1], TINY=search.tiny, SIGN=search.sign,
            BLOCK_R=rows, BLOCK_B=block, num_warps=4, enable_fp_fusion=False,  # each result is rounded, as torch's are
        )  # fmt: skip
    return scales, wide, q
