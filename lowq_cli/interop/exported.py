"""What every writer of another tool's format shares: its result, the name of its run, and that it reads back the same."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from lowq_cli.files.checkpoint import Checkpoint
from lowq_cli.interop.foreign import slabs
from lowq_packers.qtensor import QuantizedTensor

Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Exported:
    """What was written. `engines` serve it; `bytes` are those of its weight files."""

    out: str
    format: str
    bytes: int
    matrices: int
    engines: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_name(found: Checkpoint, to: str, rounding: bool) -> str:
    """What names an export: two share it only if they write the same bytes."""
    return " ".join((version("lowq"), found.source.identity, to, "round" if rounding else "exact"))


def check_same(back: QuantizedTensor | torch.Tensor, q: QuantizedTensor, name: str, rounding: bool) -> None:
    """Raise AssertionError unless `back` stands for the weights of `q`: all equal, or within half a step if `rounding`."""
    if isinstance(back, torch.Tensor) or back.shape != q.shape:
        raise AssertionError(f"{name} ({q.scheme}) does not read back as a quantized matrix")
    for (_, theirs), (_, ours) in zip(slabs(back), slabs(q), strict=True):
        a, b = theirs.dequantize(), ours.dequantize()
        if not (((a - b).abs() <= ours.scales.float().abs().max() / 2).all() if rounding else torch.equal(a, b)):
            raise AssertionError(f"{name} ({q.scheme}) does not read back as it was written")
