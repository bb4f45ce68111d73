"""NVFP4 and MXFP4: e2m1 codes, two per byte, the first in the low half (the bytes of lowq's words), and 8-bit scales."""

from __future__ import annotations

from lowq_packers.errors import DamagedError, SchemeError
from lowq_packers.formats import Config, Headers, Matrix
from lowq_packers.formats import _common as c
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor, plausible
from lowq_packers.scheme import Scheme

NVFP4, MXFP4 = Scheme(4, 16, "none", "e2m1", "e4m3"), Scheme(4, 32, "none", "e2m1", "e8m0")
SCALES = {NVFP4: ("F8_E4M3", "U8"), MXFP4: ("U8", "F8_E8M0")}
NAMES = {NVFP4: "nvfp4", MXFP4: "mxfp4"}


def shape(headers: Headers, codes: str, scales: str, scheme: Scheme) -> tuple[int, int]:
    """(N, K) of a matrix with codes (N, K / 2) and scales (N, K / group). Raises DamagedError for other shapes."""
    N, half = c.matrix(headers, codes, ("U8",))
    if 2 * half % scheme.group_size:
        raise DamagedError(f"{codes} has rows of {2 * half} codes, which groups of {scheme.group_size} do not divide")
    c.need(headers, scales, (N, 2 * half // scheme.group_size), SCALES[scheme])
    return N, 2 * half


def decoded(
    scheme: Scheme, stored: torch.Tensor, scales: torch.Tensor, name: str, factor: torch.Tensor | None = None
) -> QuantizedTensor:
    """The matrix of code bytes (N, K / 2) and scales (N, K / group). factor: one number that multiplies NVFP4's scales.

    Raises DamagedError for scales or a factor that no quantizer writes: NaN or negative, and a factor of 0 or infinity.
    """
    codes = torch.stack((stored & 15, stored >> 4), -1).reshape(stored.shape[0], -1)
    table = None if factor is None else factor.float().reshape(1, 1)
    q = QuantizedTensor.of(scheme, codes, scales.contiguous().view(torch.uint8), None, table)
    if not plausible(q.scales, scheme, "scale") or (table is not None and not plausible(table, scheme, "table")):
        raise DamagedError(f"{name} holds scales that are NaN, infinite or negative; fetch the model again")
    return q


def code_bytes(p: PackedWeight) -> torch.Tensor:
    """(N, K / 2) uint8: the bytes of lowq's words."""
    return p.words.contiguous().view(torch.uint8)[:, : p.K // 2]


def inverse(factor: torch.Tensor, name: str, rounding: bool) -> torch.Tensor:
    """The fp32 number, of shape (1,), whose reciprocal is `factor`, for formats that divide by it.

    Raises SchemeError if there is none, which holds for 17% of all factors, unless `rounding` is allowed.
    """
    nearest = (1 / factor).reshape(1)
    for near in (nearest, nearest.nextafter(nearest * 2), nearest.nextafter(nearest / 2)):
        if torch.equal(1 / near, factor.reshape(1)):
            return near
    if not rounding:
        raise SchemeError(
            f"{name}: its factor {float(factor):.8g} is 1/x of no fp32 x, and the format stores x; accept 2**-24 of it with "
            f"--round, or take --to modelopt"
        )
    return nearest


def stored_as(scheme: Scheme) -> str:
    """The storage in words."""
    return f"{NAMES[scheme]} g{scheme.group_size}"


def why_not(s: Scheme, title: str, *held: Scheme) -> str | None:
    """Why a format that holds the schemes `held` cannot hold `s`; or None."""
    if s in held:
        return None
    formats = " or ".join(f"--format {NAMES[h]}" for h in held)
    return f"{title} holds {' and '.join(stored_as(h) for h in held)}, not {s}; nearest: {formats}"


def dtype_of(scheme: Scheme, config: Config) -> str:
    """The dtype of the dense matrix: the model's, or bf16 for MXFP4, whose powers of two it holds exactly, unlike fp16."""
    return "BF16" if scheme == MXFP4 else c.model_dtype(config, "BF16")


def is_fp4(m: Matrix) -> bool:
    """Whether a matrix is NVFP4 or MXFP4."""
    return m.scheme in SCALES
