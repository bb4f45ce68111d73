"""The types `Role` and `Part`: a tensor's matrices that can be quantized, or the reason why it cannot be.

`plan/candidates.roles` gives the roles: `family_tensors.known_roles` of described families, else `hf/structure.roles`.
"""

from dataclasses import dataclass

from lowq_cli.files.source import WHOLE, Cut

TIED = "tied to the embedding"


@dataclass(frozen=True)
class Part:
    """One (N, K) matrix to quantize inside a source tensor, and the checkpoint name it is written under."""

    name: str  # e.g. "model.layers.0.mlp.experts.3.gate_proj", without ".weight"
    cut: Cut = WHOLE  # transposed if the source stores (K, N), like GPT-2's Conv1D
    target: str = ""  # the model's parameter that it becomes part of; parts of one target must share a scheme


@dataclass(frozen=True)
class Role:
    """The role of one source tensor. Without parts it is kept unquantized, for `reason`.

    extra: it belongs to a head that predicts further tokens, which is not part of the text model.
    """

    kind: str  # attention, mlp, expert, head, embedding, router, norm or other
    parts: tuple[Part, ...] = ()
    reason: str = ""  # "" if it can be quantized
    extra: bool = False
