"""Quantize a weight a few rows at a time in fp32, so that temporaries stay small for weights of any size.

A method passes `solve(groups, scheme, dtype)`: groups (R, G, group_size) fp32 -> codes (R, G, group_size) as integers in
any dtype, scales (R, G), zeros (R, G) or None. Rows are independent of each other, so slabs do not change the result.
"""

from __future__ import annotations

from collections.abc import Callable

from lowq_packers.errors import DamagedError, SchemeError
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

Solution = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor | None"]
Solve = Callable[["torch.Tensor", Scheme, "torch.dtype | None"], Solution]

# Weights per slab. On a CPU a slab and its temporaries should fit the cache; on a GPU there should be few launches: lsq of 1e9
# weights on an H100 takes 0.87 s in slabs of 2^22, 0.42 s of 2^24, 0.36 s of 2^25 (1.1 GB), 0.34 s of 2^26 (1.8 GB).
SLAB = {"cpu": 1 << 18, "cuda": 1 << 25}
FEW_DIGITS = 32.0  # scales below this multiple of a dtype's smallest number have less than five bits
UNHELD = 1e-3  # max. share of a weight's squared norm in groups whose scales a dtype cannot hold
MAX_ZERO = 1024.0  # max. |zero|: a step of max|w|/1024 is finer than bf16; zeros and scales stay well within fp16


def quantize_rows(
    W: torch.Tensor,
    scheme: Scheme,
    solve: Solve,
    dtype: torch.dtype | None,
    slab: int | None = None,
    table: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Apply `solve` to slabs of rows and join the results.

    Args:
        W: (N, K) weight of any float dtype on any device; not changed.
        slab: weights per slab; None takes SLAB.
        table: the result's table, if the scheme has one; 8-bit scales come from `solve` as bytes.
        dtype: storage dtype of scales and zeros: `solve` rounds them to it before it chooses codes, so that the codes
            are nearest for the values a kernel will read. None keeps fp32.
    Returns:
        codes, scales and zeros on W's device; scales and zeros in fp32, every value exactly representable in `dtype`.
    Raises:
        SchemeError: W is not (N, K) float, or the group size does not divide K.
        DamagedError: W holds NaN or infinities.
    """
    N, K, G = check_weight(W, scheme)
    W_q = torch.empty((N, K), dtype=torch.uint8, device=W.device)
    scales = torch.empty((N, G), dtype=torch.float32 if scheme.scale == "float" else torch.uint8, device=W.device)
    zeros = None if scheme.zero == "none" else torch.empty_like(scales)
    rows = max(1, (slab or SLAB.get(W.device.type, SLAB["cpu"])) // max(K, 1))
    for start in range(0, N, rows):
        part = slice(start, start + rows)
        groups = W[part].float().reshape(-1, G, scheme.group_size)
        if not torch.isfinite(groups.sum()) and not torch.isfinite(groups).all():
            bad = int((~torch.isfinite(W)).sum())
            raise DamagedError(f"the weight {N}x{K} holds {bad} NaN or infinite values; the model file is damaged")
        codes, scales[part], z = solve(groups, scheme, dtype)
        W_q[part] = codes.reshape(-1, K).to(torch.uint8)
        if zeros is not None and z is not None:
            zeros[part] = z
    return QuantizedTensor.of(scheme, W_q, scales, zeros, table)


def check_weight(W: torch.Tensor, scheme: Scheme) -> tuple[int, int, int]:
    """(N, K, groups per row). Raises SchemeError: W is not (N, K) float, or the group size does not divide K."""
    if W.dim() != 2 or not W.is_floating_point():
        raise SchemeError(f"a weight must be (N, K) float, got {tuple(W.shape)} {W.dtype}")
    N, K = W.shape
    return N, K, scheme.groups(K)


def unheld(W: torch.Tensor, q: QuantizedTensor, dtype: torch.dtype | None) -> float:
    """||w||^2 of the groups of W (N, K) whose scales `dtype` cannot hold: they are at its maximum or too small."""
    if dtype is None or q.scale != "float":
        return 0.0
    info, s = torch.finfo(dtype), q.scales.float()
    bad = (s >= info.max) | (s < info.smallest_normal * info.eps * FEW_DIGITS)
    if not bool(bad.any()):
        return 0.0
    groups = W.float().reshape(W.shape[0], -1, q.group_size)
    return float(groups[bad].double().square().sum())


def store(t: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """t (any shape) clamped to the finite range of `dtype`, rounded to it, and back in fp32; t itself for None."""
    if dtype is None:
        return t
    limit = torch.finfo(dtype).max
    return t.clamp(-limit, limit).to(dtype).float()


def store_scales(scales: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Positive scales (N, G) rounded to `dtype`; scales that would underflow become its smallest positive number."""
    return store(scales.clamp(min=smallest_scale(dtype)), dtype)


def smallest_scale(dtype: torch.dtype | None) -> float:
    """The smallest positive number that a scale in `dtype` may be; None: fp32."""
    smallest = torch.finfo(dtype or torch.float32).smallest_normal
    return smallest * 2.0**-10 if dtype == torch.float16 else smallest  # fp16's subnormals: 6e-8, its smallest normal is 6e-5


def store_zeros(zeros: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None) -> torch.Tensor:
    """Zeros (N, G) rounded to `dtype`; for zero="int" to integer codes 0 .. 2**bits - 1."""
    if scheme.zero == "int":
        return zeros.round().clamp(0, scheme.levels - 1)  # at most 255: exact in fp16 and bf16
    return store(zeros, dtype)


def encode(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float, levels: int) -> torch.Tensor:
    """Nearest codes (as floats) of groups (R, G, g) for scales and zeros (R, G)."""
    z = zeros.unsqueeze(-1) if isinstance(zeros, torch.Tensor) else zeros
    return (groups / scales.unsqueeze(-1)).add_(z).round_().clamp_(0, levels - 1)


def minmax(groups: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros that span each group's range, in fp32 and not rounded; zeros = `mid` for zero="none".

    "float" spans min .. max; "int" spans min .. max with 0 included, so that an integer zero exists; "none" spans
    -max|w| .. max|w|, whose upper end is not a level: a group of one value has that value as its scale. |zeros| is at most
    MAX_ZERO, which only matters for nearly constant groups.
    """
    if scheme.table:
        raise SchemeError(f"{scheme}: this method fits evenly spaced values; use lsq or rtn")
    lo, hi = groups.amin(-1), groups.amax(-1)  # aminmax takes 5 times as long on a CPU
    top = scheme.levels - 1
    absmax = torch.maximum(hi, -lo)
    if scheme.zero == "none":
        step = 2 / top if scheme.bits == 1 else torch.where(lo == hi, 1.0, 2 / top)  # a single value gets mid + 1 or mid - 1
        return absmax * step, torch.full_like(absmax, scheme.mid)
    if scheme.zero == "int":
        lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    scales = torch.maximum((hi - lo) / top, absmax / MAX_ZERO)
    return scales, torch.where(scales > 0, -lo / scales, 0.0)
