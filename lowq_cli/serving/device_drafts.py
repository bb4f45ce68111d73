"""A drafter (head or draft model) that runs after the server's passes: its state of every sequence, and its guesses.

Its keys and values are stored in separate blocks with the block numbers of the sequences (those of layers that see all tokens):
a shared prefix is found together with the model's, and moves to host memory together with it. Every row of every pass is
written there, even when no drafts are wanted, so that a sequence has no gap when drafts are wanted again; only where drafts did
not pay nothing is written (`DraftRounds.follows`). The drafter guesses worse after a shared prefix that was read then.

At the end of a prefix that two sequences share, the head's last row was paired with the next token of the first sequence: this
affects one row of a block at most. Guesses never change which tokens are generated, only how fast.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lowq_cli.engine.batch import Batch, KeyValues, upload
from lowq_cli.engine.drafts.drafter import LastRows, PagedDrafter
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.draft_graphs import After, DraftGraphs
from lowq_cli.serving.model_runner import ModelRunner
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import Run, Runs
from lowq_packers.arch.parts import Pages

# Numbers sent per row: its block table, its position, its place in the pass, its token; then per sequence its first row, its
# row among the running ones, and its number in the pass.
NUMBERS = 7


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence in a pass.

    table: the row of its block table. first: the position of the first row. at: the index of the first row in the pass.
    tokens: the rows' tokens, as far as the host knows them. after: the token after each row, as far as the host knows them.
    row: the sequence's row among the running ones if this pass samples its newest token, else -1.
    """

    table: int
    first: int
    at: int
    tokens: Sequence[int]
    after: Sequence[int] = ()
    row: int = -1


class DeviceDrafts:
    """A drafter over a paged cache.

    Args:
        drafter: a drafter whose layers keep keys and values of all tokens, or read the model's. rows: the state of the model's
            passes. state: keys and values of each of its layers, in the blocks of the first page group's tables, or the
            model's. slots: positions that these tables cover.
    Attributes:
        seconds: the seconds of the last guesses, valid on a CPU. sizes, graphs: numbers of rows that are recorded, ascending,
            and the recordings; none at first (`record`).
    """

    def __init__(self, drafter: PagedDrafter, rows: BatchState, state: Sequence[KeyValues], slots: int) -> None:
        self.sizes: list[int] = []
        self.graphs: DraftGraphs | None = None
        self.drafter, self.rows, self.state, self.device = drafter, rows, list(state), rows.device
        self.shifted = bool(drafter.layers)  # heads pair a row with the token after it, draft models with the row's own token
        self.angles = drafter.plan.angles(slots + BLOCK, self.device)
        self.seconds = 0.0

    def record(self, runner: ModelRunner, sizes: Sequence[int]) -> None:
        """Record from now on what comes after passes, with these numbers of rows. runner: the model's passes."""
        self.sizes, self.graphs = sorted({1, 2, *sizes}), DraftGraphs(runner, self.compute)

    def checked(
        self, texts: Sequence[Rows], order: Sequence[int], hidden: Mapping[int, torch.Tensor], result: torch.Tensor, K: int
    ) -> torch.Tensor | None:
        """Write the rows of a pass with drafts, whose `result` is that of `DraftPasses.run`, and return (n, K) guesses of the
        tokens after the newest ones; None for K = 0. order: the number of each sequence in the pass."""
        return self._after(texts, order, hidden, result, None, K)

    def passed(
        self,
        steps: Sequence[Rows],
        pieces: Sequence[Rows],
        hidden: Mapping[int, torch.Tensor],
        before: torch.Tensor | None,
        K: int,
    ) -> torch.Tensor | None:
        """Do the same as `checked` after a pass of steps, one row each, and pieces of prompts: guesses for those that sampled.

        before (R,): the newest tokens before the pass, required if the drafter reads the rows' own tokens.
        """
        if not pieces:
            return self._after(steps, range(len(steps)), hidden, None, before, K)
        both, b = [*steps, *pieces], len(steps)
        ends = np.cumsum([len(one.tokens) for one in both]).tolist()
        texts = [one for one in both if one.row >= 0]
        last = self._upload([end - 1 for one, end in zip(both, ends, strict=True) if one.row >= 0])
        if self.shifted:
            ids = self._upload([t for one in both for t in (*one.after, *[0] * (len(one.tokens) - len(one.after)))])
            ids.index_copy_(0, last, self._newest(texts))
        else:
            ids = self._upload([token for one in both for token in one.tokens])
            assert before is not None
            ids[:b] = before.index_select(0, self._upload([one.row for one in steps]))
        _, pos, at = _places(both)
        pos, at = upload(pos.astype(np.int32), self.device), self._upload(at)
        states, plan = self._at(self._upload([one.table for one in both])), self.drafter.plan
        tile, starts = plan.tile, [0, *(end - b for end in ends[b:])]
        spans = list(itertools.pairwise(starts))
        tiles = [(t, min(t + tile, end)) for first, end in spans for t in range(first, end, tile)]
        of = np.repeat(np.arange(b, len(both)), [end - first for first, end in spans])
        one = states[0].table
        assert one is not None
        there = upload(np.array(tiles, np.int32), self.device)
        packed = Packed(one, upload(of.astype(np.int32), self.device), pos[b:], there)
        each = [Run(first, end, 0, p.first, b + i) for i, (p, (first, end)) in enumerate(zip(pieces, spans, strict=True))]
        runs = Runs(each, ends[-1] - b, self.device)
        batch = Batch(plan.ops, ids, b, pos, self.angles, given=packed, given_runs=runs, tile=plan.tile)
        written = self.drafter.write(ids, {i: h.index_select(0, at) for i, h in hidden.items()}, batch, states)
        if not K or not texts:
            return None
        of_texts = self._at(self._upload([one.table for one in texts]))
        return self._guesses(self._newest(texts), written, pos, last, of_texts, K)

    def _after(
        self,
        texts: Sequence[Rows],
        order: Sequence[int],
        hidden: Mapping[int, torch.Tensor],
        result: torch.Tensor | None,
        before: torch.Tensor | None,
        K: int,
    ) -> torch.Tensor | None:
        """Do what `checked` does, or `passed` does of steps; on a GPU with few numbers of rows, each of them recorded."""
        counts, n = [len(one.tokens) for one in texts], len(texts)
        M, N = self._size(sum(counts)), self._size(n)
        after = After({i: hidden[i] for i in self.drafter.layers}, result, before, M, N, K)
        numbers = np.zeros((NUMBERS, M), np.int32)
        numbers[0] = self.rows.null_row
        end = sum(counts)
        numbers[:3, :end] = _places(texts)
        numbers[3, :end] = [token for one in texts for token in one.tokens]
        # what fills up the sequences are copies of the first
        of_texts = np.array([np.cumsum(counts) - counts, [one.row for one in texts], order])
        numbers[4:, :N] = np.concatenate([of_texts, np.repeat(of_texts[:, :1], N - n, 1)], 1)
        # a pass with prompts that the drafter does not read may have thousands of rows, which a recording would keep
        if self.graphs is not None and max([M, *map(len, after.hidden.values())]) <= self.sizes[-1]:
            guesses = self.graphs.run(numbers, after)
        else:
            guesses = self.compute(upload(numbers, self.device), after)
        return None if guesses is None else guesses[:n]

    def compute(self, numbers: torch.Tensor, after: After) -> torch.Tensor | None:
        """Compute `_after` from its numbers (NUMBERS, M) on the device; return guesses (N, K), None for K = 0."""
        table, pos, at, tokens = numbers[:4]
        first, row, order = numbers[4:, : after.N].long()
        last, newest, ids, at = first, self.rows.token.index_select(0, row), tokens.long(), at.long()
        if after.result is not None:
            drawn, right = after.result.chunk(2)
            last = first + right.index_select(0, order)
            ids = drawn.index_select(0, at) if self.shifted else ids
        elif after.before is not None:
            ids = after.before.index_select(0, row)
        if self.shifted:
            ids = ids.index_copy(0, last, newest)
        states, plan = self._at(table), self.drafter.plan
        batch = Batch(plan.ops, ids, len(ids), pos, self.angles, drafted=after.result is not None)
        written = self.drafter.write(ids, {i: h.index_select(0, at) for i, h in after.hidden.items()}, batch, states)
        if not after.K:
            return None
        return self._guesses(newest, written, pos, last, self._at(table.index_select(0, last)), after.K)

    def _size(self, n: int) -> int:
        """Return the number of rows, or of sequences, that are computed for n of them."""
        return next((size for size in self.sizes if size >= n), n)

    def _guesses(
        self,
        newest: torch.Tensor,
        made: Sequence[torch.Tensor],
        pos: torch.Tensor,
        last: torch.Tensor,
        of_texts: list[KeyValues],
        K: int,
    ) -> torch.Tensor:
        """Return K guesses (n, K) of each sequence. last: its last row. of_texts: the state with the sequences' tables."""
        began = time.perf_counter()
        made, pos = [t.index_select(0, last) for t in made], pos.index_select(0, last)
        guesses = self.drafter.go_on(LastRows(newest, made, pos, of_texts, self.angles), K)
        self.seconds = time.perf_counter() - began
        return guesses

    def _newest(self, texts: Sequence[Rows]) -> torch.Tensor:
        return self.rows.token.index_select(0, self._upload([one.row for one in texts]))

    def _at(self, tables: torch.Tensor) -> list[KeyValues]:
        """Return the state with the block tables of some rows."""
        rows = {id(one.table): one.table for one in self.state if one.table is not None}
        tables_of = {number: table.index_select(0, tables) for number, table in rows.items()}  # layers share them
        return [KeyValues(one.k, one.v, tables_of[id(one.table)]) for one in self.state]

    def _upload(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        return upload(np.array(numbers, np.int64), self.device)


def _places(texts: Sequence[Rows]) -> np.ndarray:
    """Return (3, M): for each row its block table, its position, and its index in the pass."""
    n = [len(one.tokens) for one in texts]
    within = np.concatenate([np.arange(k) for k in n])
    table, first, at = np.repeat([(one.table, one.first, one.at) for one in texts], n, 0).T
    return np.stack((table, first + within, at + within))


def why_not(drafter: PagedDrafter, plan: Plan) -> str:
    """Return the reason why a model's passes cannot use a drafter, or ""."""
    if not any(isinstance(spec, Pages) and not spec.window for spec in plan.states):
        return "none of its layers keeps keys and values of all tokens, and those of a drafter are stored next to them"
    return "" if drafter.reach < BLOCK else f"it guesses {drafter.reach} tokens at once, {BLOCK - 1} at most are run"
