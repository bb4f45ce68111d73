"""The prompt tokens of a pass as one array of numbers, which the host fills and sends to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lowq_cli.engine.pictures import Shown
from lowq_cli.serving.scheduler import MOST_PREFILLING
from lowq_kernels.decode.runs import CHUNK, Run, states_of


@dataclass(frozen=True)
class Piece:
    """A piece of a prompt.

    row: the row of its block tables. first: the position of its first token. target: the row that samples after it, or -1.
    slot: the slot of its recurrent state. shown: the images of its sequence.
    """

    row: int
    first: int
    tokens: Sequence[int]
    target: int
    slot: int = 0
    shown: Shown | None = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first + len(self.tokens)


def runs_of(pieces: Sequence[Piece]) -> list[Run]:
    """Return the prompt tokens of a pass as one Run per sequence."""
    ends = np.cumsum([0, *(len(p.tokens) for p in pieces)]).tolist()
    return [Run(ends[i], ends[i + 1], p.slot, p.first, p.row) for i, p in enumerate(pieces)]


def most_ends(C: int) -> int:
    """Return the max. number of prompts that can end in a pass with C prompt tokens."""
    return min(MOST_PREFILLING, C)


@dataclass(frozen=True)
class ChunkLayout:
    """The array of a pass with C prompt tokens after b rows that step: states, ids, pos, rows, tiles, take, target, as int32.

    tile: max. tokens per tile. null: the null row. padded: whether the array has one length for any pieces. by_text:
    whether layers read the tokens by sequence: recurrent ones, and attention over latents.
    """

    b: int
    C: int
    tile: int
    null: int
    padded: bool
    by_text: bool

    @property
    def states(self) -> tuple[int, int]:
        """The max. runs, and tiles of runs, of a padded pass with such layers."""
        return (most_ends(self.C), -(-self.C // CHUNK) + most_ends(self.C)) if self.padded and self.by_text else (0, 0)

    def pack(
        self, pieces: Sequence[Piece] = (), drawn: np.ndarray | None = None, runs: Sequence[Run] = ()
    ) -> tuple[np.ndarray, int]:
        """Return the array for pieces of prompts, and its number of tiles.

        drawn: (n,) values as in `BatchState.target` for the first n rows. runs: `runs_of` the pieces.
        """
        b, C, null, ends = self.b, self.C, self.null, [p for p in pieces if p.target >= 0]
        ids, pos, rows = np.zeros(C, np.int32), np.zeros(C, np.int32), np.full(C, null, np.int32)
        last, tiles, first = [], list[tuple[int, int]](), 0
        for p in pieces:
            end = first + len(p.tokens)
            ids[first:end], pos[first:end], rows[first:end] = p.tokens, np.arange(p.first, p.end), p.row
            tiles += [(t, min(t + self.tile, end)) for t in range(first, end, self.tile)]
            if p.target >= 0:
                last.append(b + end - 1)
            first = end
        of_steps = np.full(b, null, np.int32)
        of_steps[: 0 if drawn is None else len(drawn)] = () if drawn is None else drawn
        fill = most_ends(C) - len(ends) if self.padded else 0
        if self.padded:
            tiles += [(0, 0)] * (-(-C // self.tile) + most_ends(C) - len(tiles))
        take = [*range(b), *last, *([0] * fill)]
        target = [*of_steps, *(p.target for p in ends), *([null] * fill)]
        of_tiles, of_logits = np.array(tiles, np.int32).reshape(-1), np.array([*take, *target], np.int32)
        return np.concatenate([self._states(runs), ids, pos, rows, of_tiles, of_logits]), len(tiles)

    def _states(self, each: Sequence[Run]) -> np.ndarray:
        most, tiles = self.states
        numbers = np.zeros((most + tiles, 4), np.int32)
        if most and each:
            of_runs, of_tiles = states_of(each)
            numbers[: len(of_runs)] = np.array(of_runs, np.int32).reshape(-1, 4)
            numbers[most : most + len(of_tiles)] = np.array(of_tiles, np.int32).reshape(-1, 4)
        return numbers.reshape(-1)

    def unpack(self, chunk: torch.Tensor, n: int) -> Sequence[torch.Tensor]:
        """Return the parts of an array with n tiles, as views: states (runs and their tiles, 4), ids, pos and rows (C,), tiles
        (n, 2), and for each row of the logits, take and target: the row of the pass, and the row that samples from it."""
        C = self.C
        states, ids, pos, rows, tiles, logits = chunk.tensor_split(np.cumsum([4 * sum(self.states), C, C, C, 2 * n]).tolist())
        return states.view(-1, 4), ids, pos, rows, tiles.view(n, 2), *logits.tensor_split(2)
