"""The events of a run: each finished layer, tensor and file, then the result."""

from dataclasses import asdict, dataclass
from typing import Any

from lowq_cli.calibrate.requirements import CurvatureDone, LayerDone, MatrixDone, PassDone


@dataclass(frozen=True)
class TextStep:
    """The model generates its calibration text: tokens so far, and their total."""

    tokens: int
    total: int

    @property
    def line(self) -> str:
        """The progress in words."""
        return f"{self.tokens:,} of {self.total:,} tokens of its own text"


@dataclass(frozen=True)
class TensorDone:
    """One item is written to its file. rel_error = ||W - dequantized|| / ||W||, None if it was kept unquantized.

    `index` of `total` items; `params_done` of `params_total` weights (for an ETA). resumed: an earlier run wrote it.
    """

    name: str
    kind: str
    scheme: str | None
    rel_error: float | None
    seconds: float
    bytes: int
    index: int
    total: int
    params_done: int
    params_total: int
    resumed: bool


@dataclass(frozen=True)
class ShardDone:
    """One output file is complete and has its final name."""

    name: str
    bytes: int
    index: int
    total: int


@dataclass(frozen=True)
class Result:
    """The result of a run. Scripts rely on the first seven fields of its JSON."""

    out: str
    bpw: float  # bits per weight over the whole model, kept tensors included
    bytes: int  # total bytes of the weight files
    source_bytes: int
    quantized_fraction: float
    seconds: float
    peak_rss_bytes: int
    quantized_bpw: float
    already_done: bool
    resumed: int  # items that an earlier run had done
    worst: tuple[tuple[str, str, float], ...]  # (name, scheme, rel_error), largest error first

    def to_json(self) -> dict[str, Any]:
        """Plain values, one key per field."""
        return asdict(self)


@dataclass(frozen=True)
class Finished:
    """The checkpoint is complete."""

    result: Result


Event = TextStep | CurvatureDone | MatrixDone | LayerDone | PassDone | TensorDone | ShardDone | Finished
