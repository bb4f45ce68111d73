"""What drafts: on the host from the tokens of one text, or on the device within the recorded step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowq_cli.engine.batch import Batch, KeyValues, States

Angles = Mapping[Any, Any]  # cos, sin of each kind of rotation, as `Plan.angles` makes them


@dataclass(frozen=True)
class Guess:
    """Tokens that may come next. chances: of each, that it is right where all before it are."""

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()


class HostDrafter(Protocol):
    """Guesses on the host from the tokens of one text. name: for people."""

    name: str

    def begin(self, prompt: Sequence[int]) -> None:
        """The text begins with these, at least one."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """The model goes on with these."""
        ...

    def guess(self, most: int) -> Guess:
        """Up to `most` tokens that may come next."""
        ...


@dataclass(frozen=True)
class DraftRows:
    """Where rows stand. pos (M,) int32: their positions. rows (M,) int64: the place of their sequence in a cache. per: rows of
    each sequence, side by side; 0: any number."""

    pos: torch.Tensor
    rows: torch.Tensor
    per: int = 0


class DeviceDrafter(Protocol):
    """Drafts on the device, within the recorded step: heads and models, which have a cache of their own.

    name: for people. most: drafts of a step at most. layers: residual streams of the model that it reads: that which enters
    decoder layer i, after the last layer for i = number of layers, after the final norm for -1. plan: its operations.

    A cache of keys and values needs no rewind: rows are told their positions, and what lies past them is written over before it
    is read.
    """

    name: str
    most: int
    layers: tuple[int, ...]
    plan: Any

    def make_room(self, batch: int, slots: int) -> None:
        """A cache for `batch` sequences of up to `slots` tokens, which holds nothing yet."""
        ...

    def read(self, ids: torch.Tensor, hidden: dict[int, torch.Tensor], rows: DraftRows) -> None:
        """Rows of prompts: ids (M,) int64 are the tokens after them, hidden[i] (M, H) what the model's streams are there. Where
        `layers` is empty, ids are the rows' own tokens."""
        ...

    def draft(
        self, ids: torch.Tensor, hidden: dict[int, torch.Tensor], rows: DraftRows, last: torch.Tensor, K: int
    ) -> torch.Tensor:
        """Drafts (B, K) int64 after a step: ids are what was drawn after each row; last (B,) int64 each sequence's last row
        that was right. Rows after it are of no use, and are written over."""
        ...


class PagedDrafter(DeviceDrafter, Protocol):
    """A drafter whose keys and values may also lie in blocks that tables name: the server's.

    reach: places behind a text's last row that its guesses write to, at most.
    """

    reach: int

    def write(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], batch: Batch, held: Sequence[KeyValues | States]
    ) -> Sequence[torch.Tensor]:
        """Keys and values of a batch's M rows; what `go_on` asks of each row (M, ...). ids: the tokens after the rows; where
        `layers` is empty, those of the rows."""
        ...

    def go_on(
        self,
        drawn: torch.Tensor,
        made: Sequence[torch.Tensor],
        pos: torch.Tensor,
        held: Sequence[KeyValues | States],
        angles: Angles,
        K: int,
    ) -> torch.Tensor:
        """Drafts (B, K) int64 after rows at pos (B,) int32, of a sequence each, in the order of the tables of `held`.

        drawn (B,): the tokens after these rows. made: what `write` gave of them.
        """
        ...
