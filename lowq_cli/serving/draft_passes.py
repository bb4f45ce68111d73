"""Passes with drafts: of each text its newest token and what is supposed to come after it, all rows side by side.

Every row draws, and how many drafts of each text were right is counted on the device, where the text's newest token and its
position move on. The host knows all tokens when it launches such a pass. On a GPU they come in few sizes, recorded before.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from lowq_cli.engine.batch import Batch, Chain, KeyValues, States
from lowq_cli.engine.graph import Captured, capture
from lowq_cli.engine.pictures import in_pass
from lowq_cli.serving.batch_state import upload
from lowq_cli.serving.model_runner import COUNTERS, ModelRunner
from lowq_kernels import counters
from lowq_kernels.decode.reference import MOST_DRAFTS
from lowq_kernels.products.cpu.team import Follower
from lowq_packers.errors import device_lost, one_line

MOST_ROWS = 256  # of a pass with drafts: past that products take as long as they have rows
SAME = "the same kernels are to compute every step"
NUMBERS = 6  # of a row that are sent: its token, position and text; a text's first row, rows, and where it is drawn for


@dataclass(frozen=True)
class Checked:
    """A text's rows of a pass. row: of its tables. pos: the position of the newest token. target: the row that draws for it, or
    the null row. tokens: the newest and its drafts. slot, copies: of its recurrent state, and for it after each row but the
    last."""

    row: int
    pos: int
    target: int
    tokens: Sequence[int]
    slot: int = 0
    copies: Sequence[int] = ()


class DraftPasses:
    """The passes with drafts of a model.

    Attributes:
        sizes: rows that they may have, ascending. seconds: of those that are recorded, with little in the cache. reason: why
        there are none, "" where there are.
    """

    def __init__(self, passes: ModelRunner) -> None:
        self.passes, self.device = passes, passes.device
        own = {*passes.sizes, *passes.totals} if passes.padded else set(range(2, MOST_ROWS + 1))
        self.sizes = sorted(n for n in own if 1 < n <= MOST_ROWS)
        self.seconds: dict[int, float] = {}
        self.captured: dict[int, tuple[Captured, torch.Tensor]] = {}
        self.reason = ""
        if passes.fixed:
            self.reason = SAME
        elif passes.recurrent and self.device.type == "cuda":
            self.reason = "its recurrent layers go through drafts text by text, which cannot be recorded"

    def shows(self) -> bool:
        """Whether a pass may have texts that turn by places of pictures: recorded ones turn by positions."""
        return not self.captured

    def size(self, rows: int) -> int:
        """Rows of the pass that has room for so many."""
        return next(s for s in self.sizes if s >= rows)

    def run(self, texts: Sequence[Checked]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a pass: (M + M,) what was drawn after each row, then each text's drafts that were right; logits (M, V)."""
        M = self.size(sum(len(t.tokens) for t in texts))
        chunk = self._describe(M, texts)
        if M in self.captured:
            graph, place = self.captured[M]
            place.copy_(torch.from_numpy(chunk).pin_memory(), non_blocking=True)
            graph.replay()
            self.passes.noted = graph.noted
            return self.result[: 2 * M], graph.logits
        team = Follower(self.passes.teams[len(texts)]) if self.device.type == "cpu" else nullcontext()
        with team:
            return self.forward(M, upload(chunk, self.device), self._chains(texts))

    def _describe(self, M: int, texts: Sequence[Checked]) -> np.ndarray:
        null = self.passes.rows.null_row
        found = np.zeros((NUMBERS, M), np.int32)
        found[2], found[5] = null, null
        first = 0
        for i, t in enumerate(texts):
            n = len(t.tokens)
            found[0, first : first + n], found[2, first : first + n] = t.tokens, t.row
            found[1, first : first + n] = np.arange(t.pos, t.pos + n)
            found[3:, i] = first, n, t.target
            first += n
        return found.reshape(-1)

    def _chains(self, texts: Sequence[Checked]) -> list[Chain]:
        """The rows by text, for recurrent layers."""
        if not self.passes.recurrent:
            return []
        found, first = [], 0
        for t in texts:
            slots = (upload(np.array(s, np.int64), self.device) for s in ([t.slot], t.copies))
            found.append(Chain(first, first + len(t.tokens), *slots))
            first += len(t.tokens)
        return found

    def forward(self, M: int, chunk: torch.Tensor, chains: Sequence[Chain] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """The work itself: from and into tensors at fixed addresses, `chunk` as `_describe` lays it out."""
        p, r = self.passes, self.passes.rows
        ids, pos, rows, first, count, target = chunk.view(NUMBERS, M)
        tables = {id(t): t.index_select(0, rows) for t in r.tables}
        state = [self._of_rows(one, tables) for one in p.state]
        adapters = None if p.plan.adapters is None else r.adapter.index_select(0, rows)
        groups, pictures, images = (first, count, MOST_DRAFTS + 1), None, p.plan.model.images
        if images is not None and r.shifted(r.null_row):
            pictures = in_pass(images, (), self.device, pos + r.shift.index_select(0, rows))
        batch = Batch(
            p.ops, ids, M, pos, p.angles, adapters=adapters, drafted=True, chains=chains, groups=groups, pictures=pictures
        )
        logits = p.plan.capped(p.plan.logits(p.hidden(ids, batch, state))).contiguous()
        drawn, each = (
            torch.zeros(M, dtype=torch.int64, device=self.device),
            torch.arange(M, dtype=torch.int32, device=self.device),
        )
        how = r.seed.index_select(0, rows), r.temperature.index_select(0, rows)
        p.ops.choose_rows(logits, each, drawn, pos.clone(), *how)
        accepted = torch.zeros_like(drawn)
        p.ops.accept(drawn, ids.long(), first.long(), count.long(), target.long(), r.token, r.pos, accepted)
        return torch.cat((drawn, accepted)), logits

    @staticmethod
    def _of_rows(one: KeyValues | States, tables: dict[int, torch.Tensor]) -> KeyValues | States:
        return KeyValues(one.k, one.v, tables[id(one.table)]) if isinstance(one, KeyValues) else one

    def record(self, done: Callable[[int, int], None] = lambda n, of: None) -> None:
        """Record and time a pass of each size. Nothing may be on its way, and no row be anybody's."""
        self.result = torch.zeros(2 * self.sizes[-1], dtype=torch.int64, device=self.device)
        counters.reserve(len(self.sizes) * COUNTERS, self.device)
        for i, M in enumerate(self.sizes):
            place, made = upload(self._describe(M, ()), self.device), list[torch.Tensor]()

            def step(M: int = M, place: torch.Tensor = place, made: list[torch.Tensor] = made) -> None:
                result, logits = self.forward(M, place)
                self.result[: 2 * M].copy_(result)
                made.append(logits)

            step()  # its kernels are compiled; what is recorded is not run
            try:
                found = capture(step, self.passes.pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as e:  # the pass waits for the device: `reason` says it
                if device_lost(e):
                    raise
                self.reason = f"passes with drafts are not recorded: {one_line(e)}"
                return
            found.logits, found.noted = made[-1], self.passes.noted
            self.captured[M] = found, place
            self.seconds[M] = self.passes.timed(found.replay)
            done(i + 1, len(self.sizes))
