"""What a tensor of a checkpoint is: which matrices of it can be quantized, and why not where none can."""

from dataclasses import dataclass

from lowq_cli.files.source import WHOLE, Cut

TIED = "tied to the embedding"


@dataclass(frozen=True)
class Part:
    """One (N, K) matrix to quantize inside a source tensor, and the checkpoint name it is written under."""

    name: str  # e.g. "model.layers.0.mlp.experts.3.gate_proj", without ".weight"
    cut: Cut = WHOLE  # transposed, where the source stores (K, N), as of GPT-2's Conv1D
    target: str = ""  # the model's parameter it ends up in: parts with one target must share one scheme


@dataclass(frozen=True)
class Role:
    """What one source tensor is. Without parts it is kept as it is, for `reason`.

    extra: it is of a head that predicts further tokens, which is no part of the model itself.
    """

    kind: str  # attention, mlp, expert, head, embedding, router, norm or other
    parts: tuple[Part, ...] = ()
    reason: str = ""  # "" where it can be quantized
    extra: bool = False
