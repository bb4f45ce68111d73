"""Runs: consecutive tokens of several sequences (prompts, or pieces of prompts), described on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CHUNK = 64  # tokens per chunk of recurrent layers: effects of a chunk's tokens on one another are matrix products

Quads = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Run:
    """Rows first .. end of one sequence; the first has position `start`. slot: of its state; row: of its block table."""

    first: int
    end: int
    slot: int
    start: int = 0
    row: int = 0

    @property
    def length(self) -> int:
        """Tokens of the sequence up to and including the last row."""
        return self.start + self.end - self.first


@dataclass(frozen=True)
class Runs:
    """The rows of sequences. M: rows in all; the outputs of dummy rows are finite.

    given: their `states_of` on the device, at most `most` runs, padded with zeros. A pass captured in a CUDA graph reads them
    there, and `each` is empty.
    """

    each: Sequence[Run]
    M: int
    device: torch.device
    given: torch.Tensor | None = None
    most: int = 0
    _made: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)  # by size of the tiles

    @property
    def whole(self) -> bool:
        """Whether every row belongs to a sequence."""
        return self.given is None and sum(run.end - run.first for run in self.each) == self.M

    @property
    def some(self) -> bool:
        """Whether there may be any run."""
        return self.given is not None or len(self.each) > 0

    @property
    def table(self) -> torch.Tensor:
        """(runs, 4) int32 on the device, as `states_of`."""
        return self._states()[: self.most or len(self.each)]

    @property
    def tiles(self) -> torch.Tensor:
        """(n, 4) int32 on the device, as `states_of`."""
        return self._states()[self.most or len(self.each) :]

    def spans(self, size: int) -> torch.Tensor:
        """Tiles of up to `size` rows of one run: (n, 4) int32 on the device: first, end, position of the first, and the offset
        of the sequence among the concatenated tokens of all sequences."""
        if size not in self._made:
            spans, base = list[tuple[int, int, int, int]](), 0
            for run in self.each:
                starts = range(run.first, run.end, size)
                spans += [(t, min(t + size, run.end), run.start + t - run.first, base) for t in starts]
                base += run.length
            self._made[size] = self._there(spans)
        return self._made[size]

    def _states(self) -> torch.Tensor:
        if self.given is not None:
            return self.given
        if 0 not in self._made:
            table, tiles = states_of(self.each)
            self._made[0] = self._there([*table, *tiles])
        return self._made[0]

    def _there(self, made: Quads) -> torch.Tensor:
        """A copy on the device; the host does not wait for it."""
        tensor = torch.tensor(made, dtype=torch.int32)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def states_of(each: Sequence[Run]) -> tuple[Quads, Quads]:
    """The tables that recurrent layers read. Per run: first, end, index of its first tile, slot. Per tile (up to CHUNK rows of
    one run): first, end, first of the run, slot."""
    table, tiles = list[tuple[int, int, int, int]](), list[tuple[int, int, int, int]]()
    for run in each:
        table.append((run.first, run.end, len(tiles), run.slot))
        tiles += [(t, min(t + CHUNK, run.end), run.first, run.slot) for t in range(run.first, run.end, CHUNK)]
    return table, tiles
