"""Tokens of several sequences, those of each side by side, as the host knows them: prompts, or pieces of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CHUNK = 64  # tokens whose effects on one another are matrix products, in layers that remember a state

Quads = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Run:
    """Rows first .. end of one sequence, the first of which stands at `start`. slot: of its state; row: of its tables."""

    first: int
    end: int
    slot: int
    start: int = 0
    row: int = 0

    @property
    def length(self) -> int:
        """Tokens of the sequence up to the last row."""
        return self.start + self.end - self.first


@dataclass(frozen=True)
class Runs:
    """The rows of sequences. M: of all rows; what rows that are nobody's give is finite.

    given: `states_of` of them on the device, of which `most` rows are runs, padded with zeros: a pass that is recorded finds
    them there, and `each` is empty.
    """

    each: Sequence[Run]
    M: int
    device: torch.device
    given: torch.Tensor | None = None
    most: int = 0
    _made: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)  # by size of the tiles

    @property
    def whole(self) -> bool:
        """Whether every row is somebody's."""
        return self.given is None and sum(run.end - run.first for run in self.each) == self.M

    @property
    def some(self) -> bool:
        """Whether there may be any."""
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
        """(n, 4) int32 on the device, of up to `size` rows of a run each: first, end, position of the first, and where the
        sequence begins among the tokens of all sequences, one after another."""
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
        """On the device; the host does not wait for it."""
        found = torch.tensor(made, dtype=torch.int32)
        return found.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else found


def states_of(each: Sequence[Run]) -> tuple[Quads, Quads]:
    """What layers with a state ask of runs: first, end, the number of its first tile, slot; and of tiles of up to CHUNK rows of
    a run each: first, end, first of the run, slot."""
    table, tiles = list[tuple[int, int, int, int]](), list[tuple[int, int, int, int]]()
    for run in each:
        table.append((run.first, run.end, len(tiles), run.slot))
        tiles += [(t, min(t + CHUNK, run.end), run.first, run.slot) for t in range(run.first, run.end, CHUNK)]
    return table, tiles
