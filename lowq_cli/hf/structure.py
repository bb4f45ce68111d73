"""What each tensor of a checkpoint is, from config.json and the safetensors headers alone: no weights are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class TensorHeader(Protocol):
    """One tensor of a safetensors header. dtype is the safetensors name, e.g. "BF16"."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Part:
    """One (N, K) matrix to quantize inside a source tensor, and the checkpoint name it is written under."""

    name: str  # e.g. "model.layers.0.mlp.experts.3.gate_proj", without ".weight"
    expert: int | None = None  # index along dim 0 of a 3-D source tensor
    rows: tuple[int, int] | None = None  # rows of this matrix in a fused tensor; None: all of them
    transposed: bool = False  # the source stores (K, N), as GPT-2's Conv1D does: transpose before quantizing


@dataclass(frozen=True)
class Role:
    """What one source tensor is. Without parts it is kept as it is, for `reason`."""

    kind: str  # attention, mlp, expert, head, embedding, router, norm or other
    parts: tuple[Part, ...] = ()
    reason: str = ""  # "" where it can be quantized


def roles(config: dict[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, Role]:
    """The role of every tensor in `headers`, by name."""
    raise NotImplementedError
