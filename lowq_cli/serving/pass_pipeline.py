"""The passes that an engine has launched and not read yet: one is launched before the result of the one before it is read.

So the device never waits for the host; this costs one unused row in one pass after a sequence ends.
"""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from lowq_cli.engine.sampling import drawable, not_finite
from lowq_cli.serving.draft_rounds import DraftRounds
from lowq_cli.serving.flight import Flight
from lowq_cli.serving.model_runner import ModelRunner
from lowq_cli.serving.prompt_chunk import Piece
from lowq_cli.serving.sampler import Logs, Special
from lowq_cli.serving.scheduler import StepPlan
from lowq_cli.serving.sequence import Sequence

LOOK = 16  # a GPU checks all logits for NaN every LOOK steps: NaN stays in the sequence's keys, so a later check finds it
AHEAD = 1  # passes launched before the result of the oldest is read
SURE = 0.9  # fraction of a pass's expected seconds that is relied on: if it ends sooner, the device would be idle
Drafts = dict[int, tuple[list[int], list[int]]]  # by sequence number, its drafts and slots, as of `DraftRounds.draft`


class PassPipeline:
    """The passes in flight of a model.

    Args:
        passes: the model's passes. special: what samples for special requests. drafts: the engine's, or None.
    Attributes:
        ahead: passes launched before the result of the oldest is read. steps: number of passes launched.
        flights: those that are not read yet, the oldest first. due: the time at which the first of them is expected to end.
    """

    def __init__(self, passes: ModelRunner, special: Special, drafts: DraftRounds | None) -> None:
        self.passes, self.special, self.drafts = passes, special, drafts
        self.device, self.steps, self.flights = passes.device, 0, deque[Flight]()
        self.ahead = AHEAD if self.device.type == "cuda" else 0
        self.due = self._read_at = 0.0  # _read_at: when the last pass had been read

    def write(self, plan: StepPlan, drafted: bool) -> None:
        """Send the plan's changes to the device. drafted: whether the pass checks drafts; such passes take no order."""
        rows = self.passes.rows
        for source, target in plan.moves:
            rows.move(source, target)
            self.special.move(source, target)
        for row in plan.freed:
            rows.clear(row)
        for text, slot in plan.placed:
            self._place(text, slot)
        for group, row, first, held in plan.tables:
            rows.set_table(group, row, held, first)
        for row, slot in plan.slots:
            rows.set_slot(row, slot)
        for text, row, _, _ in plan.pieces:
            rows.set_adapter(row, text.request.adapter)
        for text in plan.finishing:
            self._place(text, len(text.tokens) - 1)  # sampling in this pass advances the position by one
            if text.request.special:
                self.special.begin(text)
        if not drafted:
            rows.set_order([t.row for t in sorted(plan.steps, key=lambda t: -t.computed)])
        rows.flush()

    def _place(self, text: Sequence, pos: int) -> None:
        d, rows = text.request.draw, self.passes.rows
        shift = text.shown.shift if text.shown is not None else 0
        rows.set_adapter(text.row, text.request.adapter)
        rows.place(text.row, d.seed, d.temperature, pos, drawn=not text.request.special, shift=shift)

    def launch(self, plan: StepPlan, drafts: Drafts) -> bool:
        """Launch the pass of a plan that was written, in which sequences check `drafts`; return whether there is one."""
        passes = self.passes
        passes.zero(plan.zero)
        passes.copy(plan.copies)
        if launched := bool(plan.steps or plan.pieces):
            looks = self.device.type == "cpu" or not self.steps % LOOK
            K = 0 if self.drafts is None else self.drafts.wanted(bool(drafts))
            if self.drafts is not None and drafts:
                if self.ahead:
                    # where the server was idle, the pass in flight began later than the last one was read
                    begun = max([self._read_at, *(flight.since for flight in self.flights)])
                    under_way = sum(map(self._expected, self.flights))
                    self.drafts.costs.launched(max(0.0, time.perf_counter() - begun - under_way), bool(self.flights))
                self.flights.append(self.drafts.launch(plan, drafts, K, looks))
            else:
                self.flights.append(self._plain(plan, K, looks))
            passes.copy(plan.snapshots)
            if self.drafts is not None:
                self.drafts.flying = {number: tokens for number, (tokens, _) in drafts.items()}
            passes.token_budget.stepped(len(plan.steps))
            self.steps += 1
        for text in plan.finishing:
            for group, table in enumerate(text.tables):  # only after the launch: a step of this pass may have run in that row
                passes.rows.set_table(group, text.row, table.blocks)
            passes.rows.set_slot(text.row, text.slot)
        # a drafter's guesses go past the end of the prompt that is read in such a row next, which may be shorter
        finished = set(map(id, plan.finishing))
        for row in (row for text, row, _, _ in plan.pieces if id(text) in finished):
            passes.rows.clear(row)
        return launched

    def _plain(self, plan: StepPlan, K: int, looks: bool) -> Flight:
        """Launch a pass without drafts, and the sampling that runs outside of it. looks: whether its logits are checked for
        NaN."""
        passes, null, ends = self.passes, self.passes.rows.null_row, set(map(id, plan.finishing))
        n = max((t.row + 1 for t in plan.steps), default=0)
        pieces, drawn = [], np.full(n, null, np.int32)
        for text in plan.steps:
            drawn[text.row] = null if text.request.special else text.row
        for text, row, first, end in plan.pieces:
            target = -1 if id(text) not in ends else null if text.request.special else text.row
            pieces.append(Piece(row, first, text.tokens[first:end], target, text.slot, text.shown))
        flight = Flight(self.device)
        before = None if self.drafts is None else self.drafts.newest_tokens()
        logits = passes.run(n, pieces, drawn)
        riding = passes.sizes.riding(n)
        places = [(t.row, t) for t in plan.steps] + [(riding + i, t) for i, t in enumerate(plan.finishing)]
        special = [(i, t) for i, t in places if t.request.special]
        logs = self.special.draw(logits, special) if special and logits is not None else []
        steps, rows = passes.sizes.size(n, sum(len(p.tokens) for p in pieces))
        adapted = passes.adapted(n, (p.row for p in pieces))
        # unpadded (CPU): mixed passes count as 0 steps
        size = (steps if steps == rows or passes.sizes.padded else 0, rows, adapted)
        sound = drawable(logits) if (plan.finishing or looks) and logits is not None else None
        flight.launched(places, passes.rows.token, logs, sound, size)
        if self.drafts is not None:
            self.drafts.guess_after(flight, plan, pieces, steps, before, K)
        return flight

    def land(self, most: int) -> Iterator[tuple[list[tuple[Sequence, list[int]]], dict[int, list[Logs]]]]:
        """Read passes until at most `most` are in flight; yield the sequences of each with their new tokens, and by sequence
        number the log-probabilities of each of these."""
        while len(self.flights) > most:
            flight = self.flights.popleft()
            behind = flight.over()  # if so, the next pass began at an unknown time
            tokens, seconds = flight.read()
            begun, self._read_at = max(self._read_at, flight.since), time.perf_counter()
            if self.flights:
                self.due = 0.0 if behind else time.monotonic() + SURE * self._expected(self.flights[0])
            logs = {number: log for part in flight.logs for number, log in part.read().items()}
            sound = None if flight.sound is None else flight.sound.tolist()
            if self.drafts is not None and flight.rows:
                self.passes.token_budget.drafted(seconds)
                yield self.drafts.landed(flight, tokens, sound, seconds, self._read_at - begun), logs
            else:
                steps, rows, adapted = flight.size
                self.passes.token_budget.note(steps, rows, seconds, adapted)
                if self.drafts is not None and steps != rows:
                    self.drafts.away(flight, seconds)
                elif self.drafts is not None:
                    self.drafts.stepped(steps, self._read_at - begun)
                for text, _, place in flight.drew:
                    if sound is not None and not sound[place]:
                        text.failed = not_finite(self.passes.plan.dtype)
                yield [(text, [tokens[row]]) for text, row, _ in flight.drew], logs
            if self.drafts is not None:
                self.drafts.give(flight)

    def _expected(self, flight: Flight) -> float:
        """Return the seconds that a pass, and what a drafter does after it, are expected to take."""
        if self.drafts is None:
            return self.passes.token_budget.seconds(*flight.size)
        costs = self.drafts.costs
        own = costs.known_s(flight.size[1]) if flight.rows else self.passes.token_budget.seconds(*flight.size)
        plain = costs.plain_s(len(flight.drew)) if flight.followed else 0.0
        return own + costs.read_s(plain) + flight.K * costs.guess_s(plain)
