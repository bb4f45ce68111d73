"""Tables: the values of a table scheme's codes, and scales of 8 bits.

    w[n, k] = table[q[n, k]] * scale[n, k // group_size]

A table has 2**bits entries, in the order of the codes: one of `FIXED`, or ("fitted") the weight's own, in fp32. Scales are
floats, or bytes: "e4m3" (NVFP4), which an fp32 factor of the whole weight multiplies unless the table is fitted, or "e8m0"
(MXFP4), powers of two. An e4m3 scale of a fitted table may be negative: its group then has the table's mirror image.
`companion` is what a weight holds besides words and scales: its table, or its factor, in fp32, (T, 2**bits) or (T, 1). T is 1
in the files of one matrix; where T matrices of as many rows each are one layer, row n has the table of its own: n // (N // T).
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import TYPE_CHECKING

from lowq_packers.errors import SchemeError
from lowq_packers.lazy import torch
from lowq_packers.scheme import Scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FIXED: dict[str, tuple[float, ...]] = {
    # sign, two bits of exponent (bias 1), one of mantissa: OCP Microscaling Formats 1.0, section 5.3.3
    "e2m1": (*_E2M1, *(-v for v in _E2M1)),
    # quantiles of a normal distribution, both halves with their end and one with 0: QLoRA (arXiv:2305.14314), appendix E
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # ggml's kvalues_iq4nl
    "iq4_nl": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
}
E4M3_MAX = 448.0  # byte 126; 127 is NaN, and bytes from 128 on are negative
SIGN = 0x80  # the bit that makes an e4m3 number negative
E8M0_NAN = 255
BYTES = {"e4m3": 127, "e8m0": E8M0_NAN}  # the first byte that is not a scale


@cache
def _fixed(name: str, device: torch.device) -> torch.Tensor:
    return torch.tensor([FIXED[name]], dtype=torch.float32, device=device)


def values(scheme: Scheme, companion: torch.Tensor | None, device: torch.device | None = None) -> torch.Tensor:
    """The values of the codes, fp32 (T, 2**bits), or (1, 2**bits) if the table is fixed."""
    if scheme.table == "fitted":
        assert companion is not None
        return companion
    return _fixed(scheme.table, torch.device("cpu" if device is None else device))


def from_bytes(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Scales of 8 bits, uint8 of any shape, as fp32."""
    if kind == "e4m3":
        return scales.view(torch.float8_e4m3fn).float()
    exponents = scales.to(torch.int32)
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2**-127 is a subnormal of fp32
    return torch.where(exponents == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def to_bytes(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 scales (of "e8m0" positive, ties go to the larger) as the nearest of 8 bits, at least the smallest: uint8."""
    if kind == "e4m3":
        return scales.abs().clamp(2.0**-9, E4M3_MAX).copysign(scales).to(torch.float8_e4m3fn).view(torch.uint8)
    exponent = torch.frexp(scales * (4 / 3))[1] - 1  # 2**e is nearest from 0.75 * 2**e on: the mean of its neighbours
    return (exponent + 127).clamp(0, E8M0_NAN - 1).to(torch.uint8)


def wide(scheme: Scheme, scales: torch.Tensor, companion: torch.Tensor | None) -> torch.Tensor:
    """Scales (N, G) in fp32, with the factor that multiplies those of a row."""
    values = scales.float() if scheme.scale == "float" else from_bytes(scales, scheme.scale)
    if companion is None or scheme.table == "fitted":
        return values
    return values * companion.repeat_interleave(scales.shape[0] // companion.shape[0], 0)


def look_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """codes (N, K) -> their values (N, K) fp32; table (T, levels)."""
    if table.shape[0] == 1:
        return table[0][codes.int()]
    first = torch.arange(table.shape[0], device=codes.device, dtype=torch.int32) * table.shape[1]
    return table.flatten()[(codes.reshape(table.shape[0], -1).int() + first.unsqueeze(1))].reshape(codes.shape)


def rows_of(companion: torch.Tensor | None, N: int, first: int, last: int) -> torch.Tensor | None:
    """The companion of rows first .. last - 1 of N. Raises SchemeError where they begin or end inside a table's rows."""
    if companion is None or companion.shape[0] == 1:
        return companion
    each = N // companion.shape[0]
    if first % each or last % each:
        raise SchemeError(f"rows {first} .. {last} of {N} are not whole tables of {each} rows")
    return companion[first // each : last // each]


def joined(companions: Sequence[torch.Tensor | None], rows: Sequence[int]) -> torch.Tensor | None:
    """The companion (tables, width) of matrices of so many rows each, one after the other."""
    present = [t for t in companions if t is not None]
    if not present:
        return None
    each = [n // t.shape[0] for n, t in zip(rows, present, strict=True)]
    step = gcd(*each)
    return torch.cat([t.repeat_interleave(n // step, 0) for n, t in zip(each, present, strict=True)])


def check_shape(scheme: Scheme, companion: torch.Tensor | None, N: int) -> None:
    """Raise SchemeError unless this, (tables, width) fp32 or None, is the companion of a weight of N rows."""
    width = scheme.table_width
    if companion is None and not width:
        return
    given = "none" if companion is None else f"{tuple(companion.shape)} {companion.dtype}"
    if companion is not None and width and companion.dim() == 2 and companion.dtype == torch.float32:
        T = companion.shape[0]
        if companion.shape[1] == width and T and N % T == 0:
            return
    expected = f"a float32 (T, {width}) whose T divides N={N}" if width else "none"
    raise SchemeError(f"{scheme} needs {expected} next to its scales, got {given}")


def signed(scheme: Scheme) -> bool:
    """Whether a scheme's scales may be negative."""
    return scheme.table == "fitted" and scheme.scale == "e4m3"


def good_scales(scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Whether bytes are scales: a bool () on their device."""
    return ((scales & ~SIGN if signed(scheme) else scales) < BYTES[scheme.scale]).all()


def good_companion(scheme: Scheme, companion: torch.Tensor) -> torch.Tensor:
    """Whether a table is finite, or a factor positive and finite: a bool () on its device."""
    finite = companion.isfinite()
    return (finite if scheme.table == "fitted" else finite & (companion > 0)).all()
