"""What a run tells as it goes: each layer, tensor and file as they are finished, the result."""

from dataclasses import asdict, dataclass
from typing import Any

from lowq_cli.calibrate.requirements import CurvatureDone, LayerDone, MatrixDone, PassDone


@dataclass(frozen=True)
class TextStep:
    """The model writes the text that it is calibrated on: tokens so far, of how many."""

    tokens: int
    total: int


@dataclass(frozen=True)
class TensorDone:
    """One item is in its file. rel_error = ||W - dequantized|| / ||W||, None where it was kept.

    `index` of `total` items; `params_done` of `params_total` weights (for an ETA). resumed: an earlier run did it.
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
    """One output file is whole and has its final name."""

    name: str
    bytes: int
    index: int
    total: int


@dataclass(frozen=True)
class Result:
    """What a run made. The first seven fields are the JSON that scripts rely on."""

    out: str
    bpw: float  # bits per weight over the whole model, kept tensors included
    bytes: int  # of the weight files
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
    """The checkpoint is whole."""

    result: Result


Event = TextStep | CurvatureDone | MatrixDone | LayerDone | PassDone | TensorDone | ShardDone | Finished
