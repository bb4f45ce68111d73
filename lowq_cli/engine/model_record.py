"""What lowq keeps with a model, its own or transformers': its plan, its decoder, whose tuning table it is computed by."""

from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE = "_lowq"


@dataclass
class Owned:
    """plan: an `engine.plan.Plan`. decoder: an `engine.stream.Decoder`. Both know this module, so it does not know them.

    drafters: heads and models that draft for it, by the name that asked for them.
    tuned: the folder whose lowq_tune.json chooses among kernels while this model computes; "" for that of no folder.
    sight: an `engine.vision.Sight`, of a model that has been shown a picture. folder: where it was read from.
    """

    plan: Any = None
    decoder: Any = None
    drafters: dict[str, Any] = field(default_factory=dict)
    tuned: str = ""
    sight: Any = None
    folder: str = ""


def owned(model: Any) -> Owned:
    """What belongs to this model; made empty at the first question."""
    if getattr(model, ATTRIBUTE, None) is None:
        object.__setattr__(model, ATTRIBUTE, Owned())  # not a submodule of the model
    found: Owned = getattr(model, ATTRIBUTE)
    return found


def tuned_by(model: Any, folder: str) -> None:
    """Let the table of this folder choose among kernels while the model computes, and no other's."""
    own = owned(model)
    own.tuned = folder
    if own.plan is not None:
        own.plan.tuned = folder
