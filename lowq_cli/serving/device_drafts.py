"""A drafter (head or draft model) that runs after the server's passes: its state of every sequence, and its guesses.

Its keys and values are stored in separate blocks with the block numbers of the sequences (those of layers that see all tokens):
a shared prefix is found together with the model's, and moves to host memory together with it. Every row of every pass is
written there, even when no drafts are wanted, so that a sequence has no gap when drafts are wanted again.

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
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import Run, Runs
from lowq_packers.arch.parts import Pages


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
        seconds: the seconds of the last guesses, valid on a CPU.
    """

    def __init__(self, drafter: PagedDrafter, rows: BatchState, state: Sequence[KeyValues], slots: int) -> None:
        self.drafter, self.rows, self.state, self.device = drafter, rows, list(state), rows.device
        self.shifted = bool(drafter.layers)  # heads pair a row with the token after it, draft models with the row's own token
        self.angles = drafter.plan.angles(slots + BLOCK, self.device)
        self.seconds = 0.0

    def checked(
        self, texts: Sequence[Rows], hidden: Mapping[int, torch.Tensor], result: torch.Tensor, K: int
    ) -> torch.Tensor | None:
        """Write the rows of a pass with drafts, whose `result` is that of `DraftPasses.run`, and return (n, K) guesses of the
        tokens after the newest ones; None for K = 0."""
        M, half = sum(len(one.tokens) for one in texts), len(result) // 2
        firsts = self._upload([one.at for one in texts])
        last = firsts + result[half : half + len(texts)]
        ids = self._upload([token for one in texts for token in one.tokens])
        if self.shifted:
            ids = result[:M].index_copy(0, last, self._newest(texts))
        tables, pos, _ = self._places(texts)
        states = self._at(tables)
        batch = Batch(self.drafter.plan.ops, ids, M, pos, self.angles, drafted=True)
        written = self.drafter.write(ids, {i: h[:M] for i, h in hidden.items()}, batch, states)
        return self._guesses(texts, written, pos, last, K)

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
        _, pos, at = self._places(both)
        states, packed, runs = self._at(self._upload([one.table for one in both])), None, None
        if pieces:
            tile, starts = self.drafter.plan.tile, [0, *(end - b for end in ends[b:])]
            spans = list(itertools.pairwise(starts))
            tiles = [(t, min(t + tile, end)) for first, end in spans for t in range(first, end, tile)]
            of = np.repeat(np.arange(b, len(both)), [end - first for first, end in spans])
            one = states[0].table
            assert one is not None
            there = upload(np.array(tiles, np.int32), self.device)
            packed = Packed(one, upload(of.astype(np.int32), self.device), pos[b:], there)
            each = [Run(first, end, 0, p.first, b + i) for i, (p, (first, end)) in enumerate(zip(pieces, spans, strict=True))]
            runs = Runs(each, ends[-1] - b, self.device)
        plan = self.drafter.plan
        batch = Batch(plan.ops, ids, b, pos, self.angles, given=packed, given_runs=runs, tile=plan.tile)
        written = self.drafter.write(ids, {i: h.index_select(0, at) for i, h in hidden.items()}, batch, states)
        return self._guesses(texts, written, pos, last, K)

    def _guesses(
        self, texts: Sequence[Rows], made: Sequence[torch.Tensor], pos: torch.Tensor, last: torch.Tensor, K: int
    ) -> torch.Tensor | None:
        if not K or not texts:
            return None
        began = time.perf_counter()
        states = self._at(self._upload([one.table for one in texts]))
        made, pos = [t.index_select(0, last) for t in made], pos.index_select(0, last)
        guesses = self.drafter.go_on(LastRows(self._newest(texts), made, pos, states, self.angles), K)
        self.seconds = time.perf_counter() - began
        return guesses

    def _newest(self, texts: Sequence[Rows]) -> torch.Tensor:
        return self.rows.token.index_select(0, self._upload([one.row for one in texts]))

    def _places(self, texts: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return for each row its block table, its position, and its index in the pass."""
        n = [len(one.tokens) for one in texts]
        within = np.concatenate([np.arange(k) for k in n])
        arrays = (np.repeat(np.array([getattr(one, what) for one in texts]), n) for what in ("table", "first", "at"))
        table, first, at = arrays
        pos = upload((first + within).astype(np.int32), self.device)
        return upload(table.astype(np.int64), self.device), pos, upload((at + within).astype(np.int64), self.device)

    def _at(self, tables: torch.Tensor) -> list[KeyValues]:
        """Return the state with the block tables of some rows."""
        rows = {id(one.table): one.table for one in self.state if one.table is not None}
        tables_of = {number: table.index_select(0, tables) for number, table in rows.items()}  # layers share them
        return [KeyValues(one.k, one.v, tables_of[id(one.table)]) for one in self.state]

    def _upload(self, numbers: Sequence[int]) -> torch.Tensor:
        return upload(np.array(numbers, np.int64), self.device)


def why_not(drafter: PagedDrafter, plan: Plan) -> str:
    """Return the reason why a model's passes cannot use a drafter, or ""."""
    if not any(isinstance(spec, Pages) and not spec.window for spec in plan.states):
        return "none of its layers keeps keys and values of all tokens, and those of a drafter are stored next to them"
    return "" if drafter.reach < BLOCK else f"it guesses {drafter.reach} tokens at once, {BLOCK - 1} at most are run"
