"""Shared by all writers of other tools' formats: the result, the name of a run, and the check by reading back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from lowq_cli.files.checkpoint import Checkpoint
from lowq_cli.interop.foreign import slabs
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor

Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Exported:
    """The result. `engines` can serve it; `bytes`: of its weight files. already_done: the same export already existed."""

    out: str
    format: str
    bytes: int
    matrices: int
    engines: tuple[str, ...]
    notes: tuple[str, ...]
    already_done: bool = False


def run_name(checkpoint: Checkpoint, to: str, rounding: bool) -> str:
    """The hash that names an export: two exports share it only if they write the same bytes."""
    return " ".join((version("lowq"), checkpoint.source.identity, to, "round" if rounding else "exact"))


def check_same(back: QuantizedTensor | torch.Tensor, q: QuantizedTensor, name: str, rounding: bool) -> None:
    """Raise AssertionError unless `back` represents the weights (N, K) of `q`: equal, or within half a step if `rounding`."""
    if isinstance(back, torch.Tensor) or back.shape != q.shape:
        raise AssertionError(f"{name} ({q.scheme}) does not read back as a quantized matrix")
    if _same_parts(back, q):  # true for most formats; dequantizing to compare values takes three times as long
        return
    for (_, theirs), (_, ours) in zip(slabs(back), slabs(q), strict=True):
        a, b = theirs.dequantize(), ours.dequantize()
        if not (((a - b).abs() <= ours.wide_scales.abs().max() / 2).all() if rounding else torch.equal(a, b)):
            raise AssertionError(f"{name} ({q.scheme}) does not read back as it was written")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of any dtype hold the same bytes; torch cannot compare 8-bit floats."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _same_parts(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether codes, scales, zeros and table are the same, which implies the same weights."""
    pairs = [(a.W_q, b.W_q), (a.scales, b.scales)]
    both = [(a.zeros, b.zeros), (a.table, b.table)]
    pairs += [(x, y) for x, y in both if x is not None and y is not None]
    alike = a.scheme == b.scheme and all((x is None) == (y is None) for x, y in both)
    return alike and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
