"""Passes with drafts: the rows are the newest token of each sequence and the draft tokens after it.

Every row samples a token. The device counts how many drafts of each sequence were right, and updates its newest token and its
position; the next pass takes both from there, so the host may launch it without knowing them. On a GPU passes have few sizes,
recorded at the start.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from lowq_cli.engine.batch import Batch, Chain, KeyValues, States, refill, upload
from lowq_cli.engine.drafts.drafter import GUESSED
from lowq_cli.engine.graph import Captured
from lowq_cli.engine.pictures import in_pass
from lowq_cli.serving.model_runner import COUNTERS, ModelRunner
from lowq_kernels import counters
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_kernels.products.cpu.team import Follower
from lowq_packers.errors import device_lost, one_line

MOST_ROWS = 256  # max. rows of a pass with drafts: with more, the time of products grows in proportion to the rows
FEWEST = (4, 8, 16)  # the smallest sizes of passes on a GPU, in rows
SAME = "the same kernels are to compute every step"
# Numbers sent per row: its draft token, its place among its sequence's rows, and its `Checked.state_row`; then per sequence its
# first row, its number of rows, and its `Checked.target`.
NUMBERS = 6


@dataclass(frozen=True)
class Checked:
    """A sequence's rows of a pass. state_row: its row of `BatchState`. target: the row that samples for it, or the null row.
    tokens: the newest token and its drafts, or GUESSED instead of these. slot: the slot of its recurrent state. copies: slots
    for this state after each row but the last."""

    state_row: int
    target: int
    tokens: Sequence[int]
    slot: int = 0
    copies: Sequence[int] = ()


class DraftPasses:
    """The passes with drafts of a model.

    Attributes:
        sizes: possible numbers of rows, ascending. seconds: time of recorded passes, with little in the cache, by number of
        rows and whether they are with LoRA adapters. reason: why there are no passes with drafts, or "".
    """

    def __init__(self, passes: ModelRunner) -> None:
        self.passes, self.device = passes, passes.device
        s = passes.sizes
        row_counts = {*FEWEST, *s.steps, *s.totals} if s.padded else set(range(2, MOST_ROWS + 1))
        self.sizes = sorted(n for n in row_counts if (FEWEST[0] if s.padded else 2) <= n <= MOST_ROWS)
        self.seconds: dict[tuple[int, bool], float] = {}
        self.captured: dict[tuple[int, bool], tuple[Captured, torch.Tensor]] = {}
        self.met: set[tuple[int, bool]] | None = None  # sizes that ran once, if sizes are recorded when they first repeat
        self.reason = ""
        if s.fixed:
            self.reason = SAME
        elif passes.recurrent and self.device.type == "cuda":
            self.reason = "its recurrent layers go through drafts text by text, which cannot be recorded"

    def shows(self) -> bool:
        """Return whether a pass may have sequences with images: recorded passes support only plain rotary positions."""
        return not self.captured

    def size(self, rows: int) -> int:
        """Return the number of rows of the smallest pass that has room for `rows`."""
        return next(s for s in self.sizes if s >= rows)

    def run(self, sequences: Sequence[Checked]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a pass; return (M + M + M,) the token sampled after each row, each sequence's right drafts, and each row's own
        token; logits (M, V)."""
        M = self.size(sum(len(t.tokens) for t in sequences))
        chunk, key = self._describe(M, sequences), (M, self.passes.adapted(0, (t.state_row for t in sequences)))
        if self.met is not None and key not in self.captured:
            if key in self.met:
                self._record(*key)
            self.met.add(key)
        if key in self.captured:
            graph, place = self.captured[key]
            refill(place, chunk)
            graph.replay()
            self.passes.noted = graph.noted
            return self.result[: 3 * M], graph.logits
        team = Follower(self.passes.teams[len(sequences)]) if self.device.type == "cpu" else nullcontext()
        with team:
            return self.forward(M, upload(chunk, self.device), self._chains(sequences), key[1])

    def _describe(self, M: int, sequences: Sequence[Checked]) -> np.ndarray:
        null = self.passes.rows.null_row
        numbers = np.zeros((NUMBERS, M), np.int32)
        numbers[2], numbers[5] = null, null
        if sequences:
            count = np.array([len(t.tokens) for t in sequences], np.int32)
            end, n = int(count.sum()), len(sequences)
            first = np.cumsum(count) - count
            state_row, target = np.array([(t.state_row, t.target) for t in sequences], np.int32).T
            numbers[0, :end] = [token for t in sequences for token in t.tokens]
            numbers[1, :end] = np.arange(end) - np.repeat(first, count)
            numbers[2, :end] = np.repeat(state_row, count)
            numbers[3:, :n] = first, count, target
        return numbers.reshape(-1)

    def _chains(self, sequences: Sequence[Checked]) -> list[Chain]:
        """Return the rows of each sequence, for recurrent layers."""
        if not self.passes.recurrent:
            return []
        chains, first = [], 0
        for t in sequences:
            slots = (upload(np.array(s, np.int64), self.device) for s in ([t.slot], t.copies))
            chains.append(Chain(first, first + len(t.tokens), *slots))
            first += len(t.tokens)
        return chains

    def forward(
        self, M: int, chunk: torch.Tensor, chains: Sequence[Chain] = (), adapted: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a pass, from and into tensors at fixed addresses; `chunk` has the layout of `_describe`."""
        p, r = self.passes, self.passes.rows
        ids, after, state_row, first, count, target = chunk.view(NUMBERS, M)
        used = state_row != r.null_row
        ids = torch.where(used & (after == 0), r.token.index_select(0, state_row).int(), ids)
        if r.guesses is not None:
            place = (after[:, None].long() - 1).clamp(0, r.guesses.shape[1] - 1)
            made = r.guesses.index_select(0, state_row).gather(1, place)[:, 0]
            ids = torch.where(ids == GUESSED, made.int(), ids)
        pos = torch.where(used, r.pos.index_select(0, state_row) + after, 0)
        tables = {id(t): t.index_select(0, state_row) for t in r.tables}
        state = [self._of_rows(one, tables) for one in p.state]
        adapters = r.adapter.index_select(0, state_row) if adapted else None
        most = max(2, p.sizes.most)  # sequences; 1 would mean that all rows are of one, also those that fill up the pass
        groups, pictures, images = (first[:most], count[:most], MOST_DRAFTS + 1), None, p.plan.model.images
        if images is not None and r.shifted(r.null_row):
            pictures = in_pass(images, (), self.device, pos + r.shift.index_select(0, state_row))
        batch = Batch(
            p.ops, ids, M, pos, p.angles, adapters=adapters, drafted=True, chains=chains, groups=groups, pictures=pictures
        )
        logits = p.plan.capped(p.plan.logits(p.hidden(ids, batch, state))).contiguous()
        drawn = torch.zeros(M, dtype=torch.int64, device=self.device)
        each = torch.arange(M, dtype=torch.int32, device=self.device)
        how = r.seed.index_select(0, state_row), r.temperature.index_select(0, state_row)
        p.ops.choose_rows(logits, each, drawn, pos.clone(), *how)
        accepted = torch.zeros_like(drawn)
        p.ops.accept(drawn, ids.long(), first.long(), count.long(), target.long(), r.token, r.pos, accepted)
        return torch.cat((drawn, accepted, ids.long())), logits

    @staticmethod
    def _of_rows(one: KeyValues | States, tables: dict[int, torch.Tensor]) -> KeyValues | States:
        return KeyValues(one.k, one.v, tables[id(one.table)]) if isinstance(one, KeyValues) else one

    def record(self, done: Callable[[int, int], None] = lambda n, of: None) -> None:
        """Record and time a pass of each size. No pass may be in flight, and no row may belong to a sequence."""
        self._begin()
        keys = self._keys()
        for i, key in enumerate(keys):
            if not self._record_timed(key):
                return
            done(i + 1, len(keys))

    def _keys(self) -> list[tuple[int, bool]]:
        """Return the passes to record, by number of rows and whether they are with adapters."""
        return [(M, adapted) for adapted in self.passes.sizes.kinds for M in self.sizes]

    def record_when_met(self, seconds: Mapping[tuple[int, bool], float]) -> None:
        """Record each size when it comes the second time. seconds: those of an earlier load."""
        self._begin()
        self.seconds, self.met = dict(seconds), set()

    def record_next(self) -> bool:
        """Record or time one of the passes that `record_when_met` leaves; return False if there is none. As for `record`."""
        left = (k for k in self._keys() if k not in self.captured or k not in self.seconds)
        key = None if self.met is None or self.reason else next(left, None)
        return key is not None and self._record_timed(key)

    def _record_timed(self, key: tuple[int, bool]) -> bool:
        """Record and time a pass, if that was not done. Returns False if it cannot be recorded."""
        if key not in self.captured and not self._record(*key, first=True):
            return False
        if key not in self.seconds:
            self.seconds[key] = self.passes.timed(self.captured[key][0].replay, key[1])
        return True

    def _begin(self) -> None:
        self.result = torch.zeros(3 * self.sizes[-1], dtype=torch.int64, device=self.device)
        counters.reserve(len(self._keys()) * COUNTERS, self.device)

    def _record(self, M: int, adapted: bool, first: bool = False) -> bool:
        """Record a pass; `first`: run it before, which loads its kernels. Returns False if it cannot be recorded."""
        place = upload(self._describe(M, ()), self.device)
        base = self.captured.get((M, False)) if adapted else None  # the logits of both kinds share memory

        def step() -> torch.Tensor:
            result, logits = self.forward(M, place, (), adapted)
            self.result[: 3 * M].copy_(result)
            return logits

        try:
            graph = self.passes.graph_of(step, None if base is None else base[0].logits, first)
        except RuntimeError as e:  # such as a pass that waits for the device: `reason` says so
            if device_lost(e) or (self.met is None and isinstance(e, torch.OutOfMemoryError)):
                raise
            self.reason, self.met = f"passes with drafts are not recorded: {one_line(e)}", None
            return False
        self.captured[M, adapted] = graph, place
        return True
