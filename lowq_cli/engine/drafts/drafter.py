"""Interfaces of drafters: on the host, from the tokens of one sequence, or on the device, within the recorded step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowq_cli.engine.batch import Batch, KeyValues, States

GUESSED = -1  # in place of a token: the guess of a drafter on the device, which the host has not read
Angles = Mapping[Any, Any]  # cos, sin of each kind of rotation, from `Plan.angles`


@dataclass(frozen=True)
class Guess:
    """Guessed next tokens. chances: the probability that each is right, given that all tokens before it are. own: how many of
    the first are those of a drafter on the device."""

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    own: int = 0


class HostDrafter(Protocol):
    """Guesses on the host from the tokens of one sequence. name: shown to users."""

    name: str

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a sequence with the prompt's tokens, at least one."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model drew."""
        ...

    def guess(self, most: int) -> Guess:
        """Guess up to `most` next tokens."""
        ...


class NoDrafts:
    """The drafter that never guesses."""

    name = "none"

    def begin(self, prompt: Sequence[int]) -> None:
        """As `HostDrafter.begin`."""

    def extend(self, tokens: Sequence[int]) -> None:
        """As `HostDrafter.extend`."""

    def guess(self, most: int) -> Guess:
        """As `HostDrafter.guess`."""
        return Guess()


@dataclass(frozen=True)
class DraftRows:
    """The places of rows. pos (M,) int32: their positions. rows (M,) int64: their sequence's place in the cache. per: rows of
    each sequence, which are next to each other; 0: any number."""

    pos: torch.Tensor
    rows: torch.Tensor
    per: int = 0


@dataclass(frozen=True)
class LastRows:
    """The last rows of B sequences, one each, after which a drafter guesses, in the order of the block tables of `held`.

    pos (B,) int32: their positions. drawn (B,): the tokens after them. made: the result of `PagedDrafter.write` for them.
    """

    drawn: torch.Tensor
    made: Sequence[torch.Tensor]
    pos: torch.Tensor
    held: Sequence[KeyValues | States]
    angles: Angles


class DeviceDrafter(Protocol):
    """Drafts on the device, within the recorded step: draft heads and draft models, which have a separate cache.

    name: shown to users. most: max. drafts per step. layers: the model's residual streams that the drafter reads: i is the
    input of decoder layer i, the number of layers is the output of the last one, -1 is the state after the final norm. plan:
    the drafter's operations.

    The KV cache needs no rewind after wrong drafts: rows have explicit positions, and later slots are overwritten before they
    are read.
    """

    name: str
    most: int
    layers: tuple[int, ...]
    plan: Any

    def make_room(self, batch: int, slots: int, of_model: Sequence[KeyValues | States] = ()) -> None:
        """Allocate an empty cache for `batch` sequences of up to `slots` tokens. of_model: the model's state (`lent`)."""
        ...

    def read(self, ids: torch.Tensor, hidden: dict[int, torch.Tensor], rows: DraftRows) -> None:
        """Read rows of prompts. ids (M,) int64: the token after each row, or the row's own token where `layers` is empty.
        hidden[i] (M, H): the model's stream i of `layers` at these rows."""
        ...

    def draft(
        self, ids: torch.Tensor, hidden: dict[int, torch.Tensor], rows: DraftRows, last: torch.Tensor, K: int
    ) -> torch.Tensor:
        """Drafts (B, K) int64 after a step. ids: the token drawn after each row. last (B,) int64: each sequence's last row with
        a right draft; the rows after it are ignored and overwritten."""
        ...


class PagedDrafter(DeviceDrafter, Protocol):
    """A drafter whose keys and values may also be paged, as in the server.

    reach: max. slots after a sequence's last row that its guesses write to. carries: whether its guesses begin with what
    `write` returns; else they need only the state.
    """

    reach: int
    carries: bool

    def lent(self, of_model: Sequence[KeyValues | States]) -> list[KeyValues]:
        """What the drafter reads of the model's state; empty if it has keys and values itself."""
        ...

    def write(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> Sequence[torch.Tensor]:
        """Write keys and values of a batch's M rows; returns the tensors (M, ...) that `go_on` needs. ids: the token after each
        row, or the row's own token where `layers` is empty."""
        ...

    def keep(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> None:
        """Write what `write` does, where nothing is guessed after the rows."""
        ...

    def go_on(self, last: LastRows, K: int) -> torch.Tensor:
        """Drafts (B, K) int64 after these rows."""
        ...
