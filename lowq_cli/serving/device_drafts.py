"""A drafter (head or draft model) that runs after the server's passes: its state of every sequence, and its guesses.

Its keys and values are stored in separate blocks with the block numbers of the sequences (those of layers that see all tokens):
a shared prefix is found together with the model's, and moves to host memory together with it. Every row of every pass is
written there, even when no drafts are wanted, so that a sequence has no gap when drafts are wanted again; only where drafts did
not pay nothing is written (`DraftRounds.follows`). The drafter guesses worse after a shared prefix that was read then.

At the end of a prefix that two sequences share, the head's last row was paired with the next token of the first sequence: this
affects one row of a block at most. Guesses never change which tokens are generated, only how fast.
"""

import itertools
from bisect import bisect_left
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
from lowq_cli.serving.model_runner import ModelRunner, most_recorded
from lowq_cli.serving.pass_sizes import RECORDED
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import Run, Runs
from lowq_packers.arch.parts import Pages

# Numbers sent per row: its block table, its place among its sequence's rows, its place in the pass, its sequence, its token and
# its position, both -1 where only the device knows them. Then per sequence that samples: its first row (its last one in a pass
# without drafts), its row among the running ones, and its number in the pass, -1 for a copy of the first one that only fills up
# a pass with prompts. Then per group of rows: its first row, its size.
NUMBERS = 11
GROUP = 16  # max. rows of a sequence that attend together: those of a tensor core's tile
# Max. cache slots that the rows of prompts attend to in a recording, all rows together. Where its kernels read them row by row
# (latents, chunked attention), these are up to 4 GB, 1 ms of an H200. For more slots the kernels, which then read them for 128
# rows at once, are launched one by one: this takes the host 3 to 6 ms.
SLOTS = 1 << 20
LONG = 2048  # tokens of the prompts for which `warm` launches the kernels: more than a recording takes


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

    @property
    def piece(self) -> bool:
        """Whether the rows are a piece of a prompt."""
        return len(self.tokens) > 0


class DeviceDrafts:
    """A drafter over a paged cache.

    Args:
        drafter: a drafter whose layers keep keys and values of all tokens, or read the model's. rows: the state of the model's
            passes. state: keys and values of each of its layers, in the blocks of the first page group's tables, or the
            model's. slots: positions that these tables cover.
    Attributes:
        sizes, drafted, totals, graphs: numbers of rows that are recorded, ascending, those of passes with drafts, those of
            passes with pieces of prompts, and the recordings by what is computed and whether it is after a pass with pieces:
            if these cannot be recorded, others can. None at first (`record`).
        fresh: whether the last call did what later ones do not repeat, as of `DraftGraphs.fresh`.
    """

    def __init__(self, drafter: PagedDrafter, rows: BatchState, state: Sequence[KeyValues], slots: int) -> None:
        self.sizes, self.drafted, self.totals, self.most = list[int](), list[int](), list[int](), 0
        self.graphs, self.fresh = dict[tuple[Compute, bool], DraftGraphs](), False
        self.drafter, self.rows, self.state, self.device = drafter, rows, list(state), rows.device
        self.shifted = bool(drafter.layers)  # heads pair a row with the token after it, draft models with the row's own token
        self.slots, self.angles = slots, drafter.plan.angles(slots + BLOCK, self.device)
        rows.hold_guesses(drafter.most)

    def record(self, runner: ModelRunner, sizes: Sequence[int], totals: Sequence[int] = (), most: int = 1) -> None:
        """Record from now on what comes after passes. runner: the model's passes. sizes, totals: possible numbers of rows of
        one with drafts and of one with pieces of prompts. most: sequences at once."""
        self.sizes, self.drafted, self.totals, self.most = sorted({1, 2, *sizes}), sorted(sizes), sorted(totals), most
        held, rows = dict[int, torch.Tensor](), max(*self.sizes, *self.totals)
        kinds = itertools.product((self.write, self.keep), (False, True))
        self.graphs = {(compute, pieces): DraftGraphs(runner, compute, held, rows) for compute, pieces in kinds}
        self.graphs[self.guess, False] = DraftGraphs(runner, self.guess)

    def warm(self, hidden: Mapping[int, torch.Tensor]) -> None:
        """Launch once, for no sequence, what comes after passes and prompts: it compiles and loads the kernels. hidden: as
        `combinations` takes it."""
        for _ in self.combinations(hidden):
            pass
        null, before = self.rows.null_row, None if self.shifted else self.rows.token
        states, n = {i: h[:1].expand(LONG, -1) for i, h in hidden.items()}, min(LONG, self.slots)
        long = [Rows(null, at, null, n, 0, [0] * n, [0] * (n - 1)) for at in range(0, LONG - n + 1, n)]
        self.passed([], long, states, before, self.drafter.most)

    def combinations(self, hidden: Mapping[int, torch.Tensor]) -> Iterator[bool]:
        """Compute, for no sequence, what comes after passes of each number of rows and sequences, and guess each number of
        tokens: one of them before each True, and those of passes with prompts last, as memory may be short. hidden: hidden
        states of a pass of any number of rows."""
        null, before = self.rows.null_row, None if self.shifted else self.rows.token
        states = {i: hidden[i][:1] for i in self.drafter.layers}
        for N in self.sizes[: bisect_left(self.sizes, self.most) + 1]:
            made: Sequence[torch.Tensor] = ()
            most_rows = self.sizes[min(bisect_left(self.sizes, N * (1 + self.drafter.most)), len(self.sizes) - 1)]
            for M, drafted in [(N, False), *((M, True) for M in self.drafted if N <= M <= most_rows)]:
                result = torch.zeros(3 * M, dtype=torch.int64, device=self.device) if drafted else None
                found = self._run(self.write, self._none(M), After(states, result, None if drafted else before, M, N))
                made = made or [t.clone() for t in found]
                yield True
                if not drafted:
                    self._run(self.keep, self._none(M), After(states, None, before, M, N))
                    yield True
            for K in range(1, self.drafter.most + 1):
                self._run(self.guess, np.full((2, N), null, np.int32), After(dict(enumerate(made)), N=N, K=K))
                yield True
        for M in self.totals:
            after = After(states, None, before, M, min(M, self._size(self.most)), pieces=True)
            for compute in (self.write, self.keep):
                self._run(compute, self._none(M), after)
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
        if not pieces or self._short(steps, pieces, hidden):
            return self._after([*steps, *pieces], range(len(steps) + len(pieces)), hidden, None, before, K)
        both, b, self.fresh = [*steps, *pieces], len(steps), False
        ends = np.cumsum([one.n for one in both]).tolist()
        texts = [one for one in both if one.row >= 0]
        lasts, rows = [end - 1 for one, end in zip(both, ends, strict=True) if one.row >= 0], [one.row for one in texts]
        at, ids, pos = (self._upload(numbers) for numbers in _places(both, self.shifted)[[2, 4, 5]])
        pos, going = pos.int(), self._upload([one.row for one in steps])
        if self.shifted:
            ids.index_copy_(0, self._upload(lasts), self.rows.token.index_select(0, self._upload(rows)))
        else:
            assert before is not None
            ids[:b] = before.index_select(0, going)
        pos[:b] = self.rows.pos.index_select(0, going) - 1
        states, plan = self._at(self._upload([one.table for one in both])), self.drafter.plan
        tile, starts = plan.tile, [0, *(end - b for end in ends[b:])]
        spans = list(itertools.pairwise(starts))
        tiles = [(t, min(t + tile, end)) for first, end in spans for t in range(first, end, tile)]
        of = np.repeat(np.arange(b, len(both)), [end - first for first, end in spans])
        one = states[0].table
        assert one is not None
        row_texts, row_tiles = (upload(np.array(numbers, np.int32), self.device) for numbers in (of, tiles))
        packed = Packed(one, row_texts, pos[b:], row_tiles)
        each = [Run(first, end, 0, p.first, b + i) for i, (p, (first, end)) in enumerate(zip(pieces, spans, strict=True))]
        runs = Runs(each, ends[-1] - b, self.device)
        batch = Batch(plan.ops, ids, b, pos, self.angles, given=packed, given_runs=runs, tile=plan.tile)
        read = {i: h.index_select(0, at) for i, h in hidden.items()}
        self.drafter.keep(ids, read, batch, states)
        if not K or not texts:
            return None
        last, tables = self._upload(padded(np.array([lasts, [one.table for one in texts]]), self._size(len(texts))))
        return self._guesses(texts, self._ends(ids, read, pos.index_select(0, last), tables, last), K)

    def _after(
        self,
        texts: Sequence[Rows],
        order: Sequence[int],
        hidden: Mapping[int, torch.Tensor],
        result: torch.Tensor | None,
        before: torch.Tensor | None,
        K: int,
    ) -> torch.Tensor | None:
        """Do what `checked` does, or `passed`; on a GPU with few numbers of rows, each of them recorded."""
        counts, sampled = np.array([one.n for one in texts]), [i for i, one in enumerate(texts) if one.row >= 0]
        ends, n, pieces = np.cumsum(counts), len(sampled), any(one.piece for one in texts)
        rows = len(result) // 3 if result is not None and self.sizes else int(ends[-1])  # recorded for few numbers of rows
        M = next(t for t in self.totals if t >= rows) if pieces else self._size(rows)
        N = min(M, self._size(self.most)) if pieces else self._size(n)
        after = After({i: hidden[i] for i in self.drafter.layers}, result, before, M, N, pieces=pieces)
        numbers = self._none(M)
        numbers[:6, : ends[-1]] = _places(texts, self.shifted)
        if sampled:
            firsts = ends - counts if result is not None else ends - 1
            of = [firsts[sampled], [texts[i].row for i in sampled], np.array(order)[sampled]]
            numbers[6:9, :N] = padded(np.array(of), N)
        if pieces:
            # of no sequence: many copies of one that has read much would take as long as a pass; guesses follow the others
            numbers[8, self._size(n) : N] = -1
            spans = zip(ends - counts, ends, strict=True)
            groups = [(at, min(GROUP, end - at)) for first, end in spans for at in range(first, end, GROUP)]
            numbers[9:, : len(groups)] = np.array(groups).T
        # a pass with prompts that the drafter does not read may have thousands of rows, which a recording would keep
        most, most_read = max(self.sizes, default=0), max([0, *self.sizes, *self.totals])
        short = pieces or (most >= M and all(len(h) <= most_read for h in after.hidden.values()))
        self.fresh = False
        guesses = K > 0 and n > 0
        # those after passes with drafts are recorded once: guesses follow most of them
        made = self._run(self.write if guesses or result is not None else self.keep, numbers, after, short)
        return self._guesses([texts[i] for i in sampled], [t[: self._size(n)] for t in made], K) if guesses else None

    def _short(self, steps: Sequence[Rows], pieces: Sequence[Rows], hidden: Mapping[int, torch.Tensor]) -> bool:
        """Return whether a pass with pieces of prompts is one of those that are recorded."""
        rows = max([len(steps) + sum(one.n for one in pieces), *(len(hidden[i]) for i in self.drafter.layers)])
        slots = sum(one.n * (one.first + one.n) for one in pieces)
        return bool(self.totals) and rows <= self.totals[-1] and slots <= SLOTS

    def _none(self, M: int) -> np.ndarray:
        """Return the numbers (NUMBERS, M) of M rows that belong to no sequence."""
        numbers = np.zeros((NUMBERS, M), np.int32)
        numbers[0] = numbers[7] = self.rows.null_row
        numbers[4:6] = -1
        return numbers

    def _guesses(self, texts: Sequence[Rows], made: Sequence[torch.Tensor], K: int) -> torch.Tensor:
        """Return K guesses (n, K) of each sequence. made: as `write` returns it, of as many sequences as `_size` says."""
        n = len(texts)
        numbers = padded(np.array([[one.row for one in texts], [one.table for one in texts]], np.int32), self._size(n))
        after, short = After(dict(enumerate(made)), N=numbers.shape[1], K=K), n <= max(self.sizes, default=0)
        return self._run(self.guess, numbers, after, short)[0][:n]

    def _run(self, compute: Compute, numbers: np.ndarray, after: After, short: bool = True) -> Sequence[torch.Tensor]:
        """Compute this recorded, if it is `short` and recordings were asked for."""
        graphs = self.graphs.get((compute, after.pieces)) if short else None
        if graphs is None:
            return compute(upload(numbers, self.device), after)
        made = graphs.run(numbers, after)
        self.fresh |= graphs.fresh
        return made

    def write(self, numbers: torch.Tensor, after: After) -> Sequence[torch.Tensor]:
        """Write the rows of a pass, given by numbers (NUMBERS, M) on the device. Returns what `PagedDrafter.write` returns, of
        each sequence's last row with a right draft: (N, ...) each."""
        ids, hidden, batch, held, last = self._described(numbers, after)
        if after.pieces:
            self.drafter.keep(ids, hidden, batch, held)
            none, pos, tables = numbers[8, : after.N] < 0, batch.pos.index_select(0, last), numbers[0].index_select(0, last)
            pos, tables = torch.where(none, 0, pos), torch.where(none, self.rows.null_row, tables)
            return self._ends(ids, hidden, pos, tables, last)
        return [t.index_select(0, last) for t in self.drafter.write(ids, hidden, batch, held)]

    def _ends(
        self, ids: torch.Tensor, hidden: Mapping[int, torch.Tensor], pos: torch.Tensor, tables: torch.Tensor, last: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return what `PagedDrafter.write` returns, of the rows `last` (N,) of prompts whose state is written: to guess after
        these takes nothing of the others. pos, tables (N,): their positions and block tables."""
        if not self.drafter.carries:
            return []
        ids = ids.index_select(0, last)
        batch = Batch(self.drafter.plan.ops, ids, len(ids), pos, self.angles)
        return self.drafter.write(ids, {i: h.index_select(0, last) for i, h in hidden.items()}, batch, self._at(tables))

    def keep(self, numbers: torch.Tensor, after: After) -> Sequence[torch.Tensor]:
        """Write the rows as `write` does, where nothing is guessed after them."""
        ids, hidden, batch, held, _ = self._described(numbers, after)
        self.drafter.keep(ids, hidden, batch, held)
        return []

    def _described(
        self, numbers: torch.Tensor, after: After
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor], Batch, list[KeyValues], torch.Tensor]:
        """Return the arguments of `PagedDrafter.write`, and the last row (N,) of each sequence that counts."""
        table, within, at, of, tokens, places = numbers[:6]
        first, row, order = numbers[6:9, : after.N].long()
        last, at, next_pos = first, at.long(), self.rows.pos.index_select(0, row)
        if after.result is not None:
            drawn, accepted, own = after.result.chunk(3)
            right = accepted.index_select(0, order)
            last, next_pos = first + right, next_pos - right.int()
            ids = (drawn if self.shifted else own).index_select(0, at)
        elif after.before is not None:
            ids = after.before.index_select(0, row).index_select(0, of)
        else:
            ids = torch.zeros_like(at)
        if self.shifted:
            ids = ids.index_copy(0, last, self.rows.token.index_select(0, row))
        # the host may not know yet how many of the drafts before this pass were right
        pos = torch.where(table == self.rows.null_row, 0, next_pos.index_select(0, of) - 1 + within)
        groups = None
        if after.pieces:
            ids, pos = torch.where(tokens < 0, ids, tokens), torch.where(places < 0, pos, places)
            groups = (*numbers[9:], GROUP)
        states, plan = self._at(table), self.drafter.plan
        several = after.pieces or after.result is not None
        batch = Batch(plan.ops, ids, len(ids), pos, self.angles, drafted=several, groups=groups)
        return ids, {i: h.index_select(0, at) for i, h in after.hidden.items()}, batch, states, last

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


def _places(texts: Sequence[Rows], shifted: bool) -> np.ndarray:
    """Return (6, M) for each row: its block table, its place among its sequence's rows, its place in the pass, its sequence
    among those that sample, its token and its position, both -1 where the host does not know them.

    shifted: whether a row's token is the one after it.
    """
    facts = [(one.table, one.at, one.row >= 0, one.first if one.piece else -1, one.n) for one in texts]
    table, at, samples, first, n = np.array(facts, np.int32).T
    ends = np.cumsum(n)
    within, tokens = np.arange(ends[-1]) - np.repeat(ends - n, n), np.full(ends[-1], -1)
    for one, end in zip(texts, ends, strict=True):
        if one.piece:
            known = one.after if shifted else one.tokens
            tokens[end - one.n : end - one.n + len(known)] = known
    table, at, of, first = np.repeat((table, at, np.where(samples, np.cumsum(samples) - 1, 0), first), n, 1)
    return np.stack((table, within, at + within, of, tokens, np.where(first < 0, -1, first + within)))


def recorded(
    drafter: PagedDrafter, state: Sequence[KeyValues], sizes: Sequence[int], totals: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return those of `sizes` and `totals`, the numbers of rows of passes with drafts and with prompts, after which a drafter's
    work is recorded. Its layers have the limits that a model's have: where no kernel takes experts, every replay would copy
    those of each row, and the host groups those of many rows."""
    plan = drafter.plan
    most = min(plan.most_recorded, FEW_TOKENS if plan.grouped_by_host else RECORDED)
    return [M for M in sizes if most >= M], [M for M in totals if min(most, most_recorded(plan, state)) >= M]


def why_not(drafter: PagedDrafter, plan: Plan) -> str:
    """Return the reason why a model's passes cannot use a drafter, or ""."""
    if not any(isinstance(spec, Pages) and not spec.window for spec in plan.states):
        return "none of its layers keeps keys and values of all tokens, and those of a drafter are stored next to them"
    return "" if drafter.reach < BLOCK else f"it guesses {drafter.reach} tokens at once, {BLOCK - 1} at most are run"
