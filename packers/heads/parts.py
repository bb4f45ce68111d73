"""Draft heads as data, and functions that their readers share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lowq_packers.arch.parts import Linear, Model, Norm
from lowq_packers.errors import DamagedError

Shapes = Mapping[str, tuple[int, ...] | None]  # name of a tensor -> its shape; None: packed, and checked when it is loaded


@dataclass(frozen=True)
class Target:
    """The model that a head guesses for: its description, and the config of its text part."""

    model: Model
    config: Any

    @property
    def layers(self) -> int:
        """How many it has."""
        return len(self.model.layers)


@dataclass(frozen=True)
class Fuse:
    """A head's projection of the target's features: after(project(before(features))).

    before: a norm of each feature, or one over all of them, concatenated.
    """

    project: Linear
    before: tuple[Norm, ...] = ()
    after: Norm | None = None


@dataclass(frozen=True)
class Markov:
    """DSpark's correction of each draft by the previous one: logits + out(f(first[previous token])).

    kind: "vanilla" (f is the identity), "gated" (f multiplies by a gate, computed from its input and the hidden state) or "rnn"
    (f also has a recurrent state). join: the linear layers of "gated" and "rnn". first: name of a table (vocab, rank).
    """

    kind: str
    rank: int
    first: str
    out: Linear
    join: tuple[Linear, ...] = ()


@dataclass(frozen=True)
class Block:
    """A head that drafts a block of tokens at once.

    size: rows of the block: the newest token and mask tokens. earlier: row k drafts the token after its position, not the one
    at it. causal: a row sees only rows up to its own. vector: name of a vector that replaces the mask token's embedding; "":
    the model's embedding is used.
    """

    size: int
    mask: int
    earlier: bool
    causal: bool
    markov: Markov | None = None
    vector: str = ""


@dataclass(frozen=True)
class Assistant:
    """A head that attends to keys and values of the model's cache (`Model.lent`), and has none itself.

    All its guesses are made at the position of the newest token, whose keys are not there yet. back: from its hidden state to
    the model's width, for the next guess. centroids: (number of groups of the vocabulary, how many of them it guesses from).
    """

    back: Linear
    centroids: tuple[int, int] | None = None


@dataclass(frozen=True)
class Head:
    """A head that takes (token t + 1, hidden state of token t) and drafts token t + 2.

    kind: the name shown to users. model: its layers and last norm; `model.vocab` is the number of tokens it can draft,
    `model.embed` and `model.head` are the names of its own embedding and output head.
    taps: layers of the target whose inputs (residual stream) are the features; the number of layers means the last layer's
    output. Empty: the feature is the last hidden state after the norm. fuse: the projection of the features; None: the feature
    is the hidden state.
    recycled: which of the head's own states replaces the target's hidden state for the next draft: its residual stream, or the
    normed one. own_embed, own_head: whether the files have them; otherwise the target's are used. mapped: drafts are ids of a
    reduced vocabulary, to which `d2t` adds the difference from the target's ids. parallel: the token in place of tokens not yet
    known, if all drafts are computed at once; `mask_hidden` replaces their features. block: set if it drafts a block.
    assistant: set if it reads the model's cache.
    """

    kind: str
    model: Model
    taps: tuple[int, ...]
    fuse: Fuse | None
    recycled: Literal["stream", "normed"]
    own_embed: bool = False
    own_head: bool = False
    mapped: bool = False
    parallel: int | None = None
    block: Block | None = None
    assistant: Assistant | None = None


@dataclass(frozen=True)
class Read:
    """A head and the place of its tensors. files: name in the description -> name in the files. note: what was assumed."""

    head: Head
    config: Any
    files: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


MAPS, MASK = ("d2t", "t2d"), "mask_hidden"


def check_tensors(expected: Shapes, shapes: Shapes, ignored: tuple[str, ...] = ()) -> None:
    """Raise DamagedError unless the tensors are exactly `expected`; names that begin with one of `ignored` are allowed, too."""
    if missing := sorted(expected.keys() - shapes.keys()):
        raise DamagedError(f"the draft head has no tensor {missing[0]} ({len(missing)} of {len(expected)} are missing)")
    if odd := sorted(n for n in shapes.keys() - expected.keys() if not n.startswith(ignored)):
        raise DamagedError(f"the draft head has a tensor that its kind does not use: {odd[0]}")
    if wrong := next((n for n, shape in expected.items() if shapes[n] not in (shape, None)), None):
        raise DamagedError(f"{wrong} of the draft head is {shapes[wrong]}, its config.json asks for {expected[wrong]}")


def moved(part: Any, old: str, new: str) -> Any:
    """The same part with module names below `old` moved below `new`."""
    if isinstance(part, str):
        return new + part.removeprefix(old) if part == old or part.startswith(f"{old}.") else part
    if isinstance(part, tuple):
        return tuple(moved(one, old, new) for one in part)
    if hasattr(part, "__dataclass_fields__"):
        return replace(part, **{name: moved(getattr(part, name), old, new) for name in part.__dataclass_fields__})
    return part
