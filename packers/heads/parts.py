"""Draft heads as data, and functions that their readers share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lowq_packers.arch.parts import Linear, Model, Norm
from lowq_packers.errors import DamagedError

Shapes = Mapping[str, tuple[int, ...] | None]  # of tensors by name; None: packed, and checked by who reads it


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

    kind: "vanilla" (f is nothing), "gated" (times a gate of it and the hidden state) or "rnn" (a state beside). join: of the
    latter two their product. first: name of a table (vocab, rank).
    """

    kind: str
    rank: int
    first: str
    out: Linear
    join: tuple[Linear, ...] = ()


@dataclass(frozen=True)
class Block:
    """A head that guesses a block at once.

    size: rows of it, the newest token and mask tokens. earlier: row k guesses the token behind it, not its own. causal: rows
    see those before them alone. vector: name of what stands for the mask token's embedding, "" for that of the model.
    """

    size: int
    mask: int
    earlier: bool
    causal: bool
    markov: Markov | None = None
    vector: str = ""


@dataclass(frozen=True)
class Head:
    """A head that takes (token t + 1, hidden state of token t) and guesses token t + 2.

    kind: for people. model: its layers and last norm; vocab: how many tokens it can guess; embed, head: names of its own ones.
    taps: layers of the target whose incoming residual stream is a feature each, one past the last for what leaves that; empty:
    the feature is the last hidden state, normed. fuse: of the features (none: the feature itself is the hidden state).
    recycled: which of its own states stands for the target's in the next guess: its residual stream, or that normed.
    own_embed, own_head: whether the files have them; else they are the target's. mapped: guesses are ids of its own, to which
    `d2t` adds what makes them the target's. parallel: the token that stands for one that is not known yet, where all guesses
    are made at once; `mask_hidden` stands for its features. block: of a head that guesses a block.
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


@dataclass(frozen=True)
class Read:
    """A head and where its tensors are. files: name in the description -> in the files. note: what was taken for granted."""

    head: Head
    config: Any
    files: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


MAPS, MASK = ("d2t", "t2d"), "mask_hidden"


def check_tensors(wanted: Shapes, shapes: Shapes, ignored: tuple[str, ...] = ()) -> None:
    """Raise DamagedError unless exactly the tensors `wanted` are there; those that begin with one of `ignored` may be."""
    if missing := sorted(wanted.keys() - shapes.keys()):
        raise DamagedError(f"the draft head has no tensor {missing[0]} ({len(missing)} of {len(wanted)} are missing)")
    if odd := sorted(n for n in shapes.keys() - wanted.keys() if not n.startswith(ignored)):
        raise DamagedError(f"the draft head has a tensor that its kind does not use: {odd[0]}")
    if wrong := next((n for n, shape in wanted.items() if shapes[n] not in (shape, None)), None):
        raise DamagedError(f"{wrong} of the draft head is {shapes[wrong]}, its config.json asks for {wanted[wrong]}")


def moved(part: Any, old: str, new: str) -> Any:
    """The same part with module names below `old` moved below `new`."""
    if isinstance(part, str):
        return new + part.removeprefix(old) if part == old or part.startswith(f"{old}.") else part
    if isinstance(part, tuple):
        return tuple(moved(one, old, new) for one in part)
    if hasattr(part, "__dataclass_fields__"):
        return replace(part, **{name: moved(getattr(part, name), old, new) for name in part.__dataclass_fields__})
    return part
