"""A drafter (head or draft model) that runs after the server's passes: its state of every sequence, and its guesses.

Its keys and values are stored in separate blocks with the block numbers of the sequences (those of layers that see all tokens):
a shared prefix is found together with the model's, and moves to host memory together with it. Every row of every pass is
written there, even when no drafts are wanted, so that a sequence has no gap when drafts are wanted again; only where drafts did
not pay nothing is written (`DraftRounds.follows`). The drafter guesses worse after a shared prefix that was read then.

At the end of a prefix that two sequences share, the head's last row was paired with the next token of the first sequence: this
affects one row of a block at most. Guesses never change which tokens are generated, only how fast.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lowq_cli.engine.batch import Batch, KeyValues, upload
from lowq_cli.engine.drafts.drafter import LastRows, PagedDrafter
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.draft_graphs import After, Compute, DraftGraphs
from lowq_cli.serving.model_runner import ModelRunner
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import Run, Runs
from lowq_packers.arch.parts import Pages

# Numbers sent per row: its block table, its place among its sequence's rows, its place in the pass, its sequence; then per
# sequence its first row, its row among the running ones, and its number in the pass.
NUMBERS = 7
PROMPTS = (64, 512)  # lengths, in tokens, of the prompts for which `warm` launches the kernels: a short and a long product each


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence in a pass.

    table: the row of its block table. at: the index of the first row in the pass. row: the sequence's row among the running
    ones if this pass samples its newest token, else -1. n: the number of rows. Of a piece of a prompt besides: first, the
    position of the first row; tokens, those of the rows; after, the token after each row but that after the prompt.
    """

    table: int
    at: int
    row: int
    n: int = 1
    first: int = 0
    tokens: Sequence[int] = ()
    after: Sequence[int] = ()


class DeviceDrafts:
    """A drafter over a paged cache.

    Args:
        drafter: a drafter whose layers keep keys and values of all tokens, or read the model's. rows: the state of the model's
            passes. state: keys and values of each of its layers, in the blocks of the first page group's tables, or the
            model's. slots: positions that these tables cover.
    Attributes:
        sizes, drafted, graphs: numbers of rows that are recorded, ascending, those of passes with drafts, and the recordings
            by what is computed; none at first (`record`).
        fresh: whether the last call did what later ones do not repeat, as of `DraftGraphs.fresh`.
    """

    def __init__(self, drafter: PagedDrafter, rows: BatchState, state: Sequence[KeyValues], slots: int) -> None:
        self.sizes, self.drafted = list[int](), list[int]()
        self.graphs, self.fresh = dict[Compute, DraftGraphs](), False
        self.drafter, self.rows, self.state, self.device = drafter, rows, list(state), rows.device
        self.shifted = bool(drafter.layers)  # heads pair a row with the token after it, draft models with the row's own token
        self.angles = drafter.plan.angles(slots + BLOCK, self.device)
        rows.hold_guesses(drafter.most)

    def record(self, runner: ModelRunner, sizes: Sequence[int]) -> None:
        """Record from now on what comes after passes. runner: the model's passes. sizes: possible numbers of rows of one with
        drafts."""
        self.sizes, self.drafted = sorted({1, 2, *sizes}), sorted(sizes)
        self.graphs = {compute: DraftGraphs(runner, compute) for compute in (self.write, self.guess)}

    def warm(self, hidden: Mapping[int, torch.Tensor], most: int) -> None:
        """Launch once, for no sequence, what comes after passes and prompts: it compiles and loads the kernels. The arguments
        are those of `combinations`."""
        for _ in self.combinations(hidden, most):
            pass
        null, before = self.rows.null_row, None if self.shifted else self.rows.token
        for n in PROMPTS:
            states = {i: h[:1].expand(n, -1) for i, h in hidden.items()}
            self.passed([], [Rows(null, 0, null, n, 0, [0] * n, [0] * (n - 1))], states, before, self.drafter.most)

    def combinations(self, hidden: Mapping[int, torch.Tensor], most: int) -> Iterator[bool]:
        """Compute, for no sequence, what comes after passes of each number of rows and sequences, and guess each number of
        tokens: one of them before each True. hidden: hidden states of a pass of `sizes[-1]` rows. most: sequences at once."""
        null, before = self.rows.null_row, None if self.shifted else self.rows.token
        for N in self.sizes[: bisect_right(self.sizes, most)]:
            made: Sequence[torch.Tensor] = ()
            most_rows = self.sizes[min(bisect_left(self.sizes, N * (1 + self.drafter.most)), len(self.sizes) - 1)]
            for M, drafted in [(N, False), *((M, True) for M in self.drafted if N <= M <= most_rows)]:
                numbers = np.zeros((NUMBERS, M), np.int32)
                numbers[0] = numbers[5] = null
                result = torch.zeros(3 * M, dtype=torch.int64, device=self.device) if drafted else None
                states = {i: hidden[i][:M] for i in self.drafter.layers}
                found = self._run(self.write, numbers, After(states, result, None if drafted else before, M, N))
                made = made or [t.clone() for t in found]
                yield True
            for K in range(1, self.drafter.most + 1):
                self._run(self.guess, np.full((2, N), null, np.int32), After(dict(enumerate(made)), N=N, K=K))
                yield True

    def checked(
        self, texts: Sequence[Rows], order: Sequence[int], hidden: Mapping[int, torch.Tensor], result: torch.Tensor, K: int
    ) -> torch.Tensor | None:
        """Write the rows of a pass with drafts, whose `result` is that of `DraftPasses.run`, and return (n, K) guesses of the
        tokens after the newest ones, also written into `BatchState.guesses`; None for K = 0. order: the number of each sequence
        in the pass."""
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
        both, b, self.fresh = [*steps, *pieces], len(steps), False
        ends = np.cumsum([one.n for one in both]).tolist()
        texts = [one for one in both if one.row >= 0]
        lasts, rows = [end - 1 for one, end in zip(both, ends, strict=True) if one.row >= 0], [one.row for one in texts]
        if self.shifted:
            ids = self._upload([t for one in both for t in (*one.after, *[0] * (one.n - len(one.after)))])
            ids.index_copy_(0, self._upload(lasts), self.rows.token.index_select(0, self._upload(rows)))
        else:
            ids = self._upload([0] * b + [token for one in pieces for token in one.tokens])
            assert before is not None
            ids[:b] = before.index_select(0, self._rows(steps))
        _, after, at, of = _places(both)
        pos = upload((after + np.array([one.first for one in both])[of]).astype(np.int32), self.device)
        pos[:b] = self.rows.pos.index_select(0, self._rows(steps)) - 1
        at = self._upload(at)
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
        last = self._upload(padded(np.array([lasts]), self._size(len(texts)))[0])
        return self._guesses(texts, [t.index_select(0, last) for t in written], K)

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
        counts, n = [one.n for one in texts], len(texts)
        rows = sum(counts) if result is None or not self.sizes else len(result) // 3  # recorded for few numbers of rows
        M, N = self._size(rows), self._size(n)
        after = After({i: hidden[i] for i in self.drafter.layers}, result, before, M, N)
        numbers = np.zeros((NUMBERS, M), np.int32)
        numbers[0] = self.rows.null_row
        end = sum(counts)
        numbers[:4, :end] = _places(texts)
        numbers[4:, :N] = padded(np.array([np.cumsum(counts) - counts, [one.row for one in texts], order]), N)
        # a pass with prompts that the drafter does not read may have thousands of rows, which a recording would keep
        short = max([M, *map(len, after.hidden.values())]) <= max(self.sizes, default=0)
        self.fresh = False
        made = self._run(self.write, numbers, after, short)
        return self._guesses(texts, made, K) if K else None

    def _guesses(self, texts: Sequence[Rows], made: Sequence[torch.Tensor], K: int) -> torch.Tensor:
        """Return K guesses (n, K) of each sequence. made: as `write` returns it, of as many sequences as `_size` says."""
        n = len(texts)
        numbers = padded(np.array([[one.row for one in texts], [one.table for one in texts]], np.int32), self._size(n))
        return self._run(self.guess, numbers, After(dict(enumerate(made)), N=numbers.shape[1], K=K))[0][:n]

    def _run(self, compute: Compute, numbers: np.ndarray, after: After, short: bool = True) -> Sequence[torch.Tensor]:
        """Compute this recorded, if it is `short` and recordings were asked for."""
        graphs = self.graphs.get(compute) if short else None
        if graphs is None:
            return compute(upload(numbers, self.device), after)
        made = graphs.run(numbers, after)
        self.fresh |= graphs.fresh
        return made

    def write(self, numbers: torch.Tensor, after: After) -> Sequence[torch.Tensor]:
        """Write the rows of a pass, given by numbers (NUMBERS, M) on the device. Returns what `PagedDrafter.write` returns, of
        each sequence's last row with a right draft: (N, ...) each."""
        table, within, at, of = numbers[:4]
        first, row, order = numbers[4:, : after.N].long()
        last, at, next_pos = first, at.long(), self.rows.pos.index_select(0, row)
        if after.result is not None:
            drawn, accepted, own = after.result.chunk(3)
            right = accepted.index_select(0, order)
            last, next_pos = first + right, next_pos - right.int()
            ids = (drawn if self.shifted else own).index_select(0, at)
        elif after.before is not None:
            ids = after.before.index_select(0, row)
        else:
            ids = torch.zeros_like(at)
        if self.shifted:
            ids = ids.index_copy(0, last, self.rows.token.index_select(0, row))
        # the host may not know yet how many of the drafts before this pass were right
        pos = torch.where(table == self.rows.null_row, 0, next_pos.index_select(0, of) - 1 + within)
        states, plan = self._at(table), self.drafter.plan
        batch = Batch(plan.ops, ids, len(ids), pos, self.angles, drafted=after.result is not None)
        written = self.drafter.write(ids, {i: h.index_select(0, at) for i, h in after.hidden.items()}, batch, states)
        return [t.index_select(0, last) for t in written]

    def guess(self, numbers: torch.Tensor, after: After) -> Sequence[torch.Tensor]:
        """Return guesses (N, K) after rows that were written, and write them into `BatchState.guesses`. numbers (2, N): each
        sequence's row among the running ones, and that of its block table. after.hidden: what `write` returned."""
        row, table = numbers.long()
        # passes move the null row's position on and on, past the end of its table
        pos = torch.where(row == self.rows.null_row, 0, self.rows.pos.index_select(0, row) - 1)
        newest = self.rows.token.index_select(0, row)
        made = list(after.hidden.values())
        guesses = self.drafter.go_on(LastRows(newest, made, pos, self._at(table), self.angles), after.K)
        assert self.rows.guesses is not None
        self.rows.guesses[:, : after.K].index_copy_(0, row, guesses)
        return [guesses]

    def _size(self, n: int) -> int:
        """Return the number of rows, or of sequences, that are computed for n of them."""
        return next((size for size in self.sizes if size >= n), n)

    def _rows(self, texts: Sequence[Rows]) -> torch.Tensor:
        return self._upload([one.row for one in texts])

    def _at(self, tables: torch.Tensor) -> list[KeyValues]:
        """Return the state with the block tables of some rows."""
        rows = {id(one.table): one.table for one in self.state if one.table is not None}
        tables_of = {number: table.index_select(0, tables) for number, table in rows.items()}  # layers share them
        return [KeyValues(one.k, one.v, tables_of[id(one.table)]) for one in self.state]

    def _upload(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        return upload(np.array(numbers, np.int64), self.device)


def padded(numbers: np.ndarray, n: int) -> np.ndarray:
    """Return numbers (R, k), k <= n, with copies of the first column behind them up to (R, n)."""
    return np.concatenate([numbers, np.repeat(numbers[:, :1], n - numbers.shape[1], 1)], 1)


def _places(texts: Sequence[Rows]) -> np.ndarray:
    """Return (4, M): for each row its block table, its place among its sequence's rows, its place in the pass, its sequence."""
    n = [one.n for one in texts]
    within = np.concatenate([np.arange(k) for k in n])
    table, at, of = np.repeat([(one.table, one.at, i) for i, one in enumerate(texts)], n, 0).T
    return np.stack((table, within, at + within, of))


def why_not(drafter: PagedDrafter, plan: Plan) -> str:
    """Return the reason why a model's passes cannot use a drafter, or ""."""
    if not any(isinstance(spec, Pages) and not spec.window for spec in plan.states):
        return "none of its layers keeps keys and values of all tokens, and those of a drafter are stored next to them"
    return "" if drafter.reach < BLOCK else f"it guesses {drafter.reach} tokens at once, {BLOCK - 1} at most are run"
