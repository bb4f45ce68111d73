"""Decode one sequence with drafts: choose the number of drafts of each step, and count the results."""

import time
from collections.abc import Sequence
from typing import Any

from lowq_cli.engine.drafts.balance import Balance
from lowq_cli.engine.drafts.draft_length import ENOUGH, Costs, TableCosts, TimedCosts, worth
from lowq_cli.engine.drafts.drafter import DeviceDrafter, Guess, HostDrafter
from lowq_cli.engine.drafts.rates import BEFORE, Rates
from lowq_cli.engine.drafts.recordings import Recordings
from lowq_cli.engine.expert_steps import Experts
from lowq_packers.arch.parts import Recurrent
from lowq_packers.lazy import torch

# row counts of steps with drafts; few on a GPU, because each is recorded separately
WIDTHS = {"cuda": (4, 6, 8, 16), "cpu": (2, 3, 4, 6, 8, 12, 16)}
SAME_ROWS = (
    4  # rows of every step on a GPU where texts are to have the same bits with any drafts: 1.55 ms of an 8B, one row 1.30
)
# A test compares these numbers, GAP_S apart, with the files of benchmarks/results that they name.
# On a CPU, until steps are timed: rows -> time of a step, in steps of one row. As base in 4 bits took after 200 tokens with one
# thread (`steps` in cpu/drafts.json).
STARTING_COSTS = {1: 1.0, 2: 1.25, 16: 3.5}
# Seconds from the end of a step to the launch of a step whose drafts the host makes from its tokens: steps of 16 rows of base
# take 118 us (4 bits) and 163 us (16 bits) on an H200, and 230 and 266 us in the loop.
GAP_S = 100e-6
# Bytes of weights read per second. An H100 reads 3.3e12 in a step of an 8B model in 4 bits, less LAYER_S for each of the 32
# layers, an H200 4.5e12 (decode_8b.json).
READ = 3.6e12
LAYER_S = 10e-6  # seconds of a layer in addition to its weights: of 76 us of a step of base, 6 layers (h200/draft_heads.json)
# Seconds of a layer in addition with two rows or more, because norms and sums are then separate from the products: a step of an
# 8B model in 4 bits after 512 tokens takes 1.30 ms with one row, 1.51 ms with two (h200/drafts.json).
WIDE_LAYER_S = 6.5e-6
ROW = 0.0225  # time of each row after the second, in steps of one row: that model takes 1.92 ms with 16 rows
FIRST = 16  # plain steps on a GPU before the first drafts, to measure the time of a step
# Min. seconds of a plain step, in GAP_S, of a large model: its host has time to look for drafts and to record steps while the
# device computes. With steps of 1.3 and of 0.38 ms the first texts of a process had at least 0.98 of the speed of plain steps
# (8B and 1B in 4 bits, H200); smaller models were not measured.
LARGE = 3.0
AGAIN = 64  # plain steps after which a device drafter that did not pay off is tried again


class Drafting:
    """The steps of a decoder's only sequence.

    same: whether all steps are to have the same number of rows, so that the same kernels compute each token with any drafts or
    none. On a CPU the bits of a row do not depend on the number of rows.

    Attributes:
        drafted, accepted: counts of tokens. steps: count of steps with drafts. clock: the seconds that `took` is given. ahead:
        whether a step may be launched before the previous one is read, which needs drafts that are made on the device.
    """

    ahead = False

    def __init__(self, drafter: HostDrafter | DeviceDrafter, decoder: Any, same: bool = False) -> None:
        self.drafter, self.decoder = drafter, decoder
        kind = decoder.device.type
        self.same = same and kind != "cpu"
        self.widths: tuple[int, ...] = (SAME_ROWS,) if self.same else WIDTHS[kind]
        # on a CPU: one set of timings per drafter for all texts, so that only the first text begins with timed steps
        begun = decoder.timed.setdefault(drafter.name, TimedCosts(TableCosts(STARTING_COSTS))) if kind == "cpu" else None
        self.timed: TimedCosts | None = begun
        # on a CPU the thread's own time: on a busy machine wide steps wait for other processes more often than plain ones
        self.clock = time.thread_time if begun is not None else time.perf_counter
        self.costs: Costs = self.timed or estimated(decoder.plan)
        self.apart = 0.0
        # per drafter, for all texts: a step with drafts costs the host more time than the table of costs has
        self.balance = None if self.timed or self.same else decoder.balances.setdefault(drafter.name, Balance(FIRST))
        self.drafted = self.accepted = self.steps = 0
        self.rows = 1  # of the last step that was read
        self.once = False  # whether the drafter read a prompt during that step, or a step was recorded: later steps do not

    def about(self) -> str:
        """The drafter's name and the costs of steps with drafts, for `--explain`."""
        costs = ", ".join(f"{w}: {self.costs(w):.2f}" for w in self.widths)
        return f"{self.drafter.name}; estimated cost of a step by its rows, in plain steps: {costs}"

    def numbers(self, tokens: int, steps: int) -> dict[str, Any]:
        """The counts, given the number of tokens after the first and of all steps, with and without drafts."""
        counts = {"drafter": self.drafter.name, "drafted": self.drafted, "accepted": self.accepted}
        counts |= {"steps": steps, "steps_with_drafts": self.steps}
        return counts | {"tokens_per_step": round(tokens / max(steps, 1), 3)}

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a sequence with the prompt's tokens. A drafter on the device has read them together with the model."""

    @property
    def allowed(self) -> bool:
        """Whether steps may have drafts, by the times of earlier ones."""
        return self.balance is None or self.balance.allowed

    def took(self, tokens: int, seconds: float) -> None:
        """Record the new tokens of the last step that was read, and the seconds until the next one can be read."""
        if self.timed is not None:
            self.timed.note(self.rows, seconds)
        if self.balance is not None:
            self.balance.note(tokens, seconds, self.once)
        self.once = False

    def plain(self) -> "torch.Tensor":
        """Launch a step without drafts; returns its output tensor."""
        return self._verify((), SAME_ROWS) if self.same else self.decoder.step()  # type: ignore[no-any-return]

    def _verify(self, drafts: Sequence[int], rows: int) -> "torch.Tensor":
        verification = self.decoder.verify(drafts, rows)
        self.once |= verification.new or (self.timed is not None and rows not in self.timed.tried)
        return verification.result

    def _count(self, drafts: int, accepted: int) -> None:
        self.steps, self.drafted, self.accepted = self.steps + 1, self.drafted + drafts, self.accepted + min(drafts, accepted)


class FromHost(Drafting):
    """Drafts that the host makes from the tokens: a step with drafts is launched after all earlier steps are read.

    The drafter is given tokens only while drafts are allowed.
    """

    def __init__(self, drafter: HostDrafter, decoder: Any, same: bool = False) -> None:
        super().__init__(drafter, decoder, same)
        self.host = drafter
        self.prompt, self.new = list[int](), list[int]()  # tokens that the drafter has not been given yet
        self.step_s = step_s(decoder.plan)
        self.apart = GAP_S / self.step_s if decoder.ahead else 0.0
        self.since = 0.0  # when the device began the step that is read next, by `time.perf_counter`
        self.recordings: Recordings | None = None  # where steps are recorded before they are needed
        if self.balance is not None and is_large(decoder.plan) and decoder.graphs:
            begun = Recordings(decoder, self.widths, self.step_s)
            self.recordings = decoder.recordings.setdefault(drafter.name, begun)

    @property
    def plain_s(self) -> float:
        """Seconds of a plain step by the clock; 0 until one is timed, and where none is."""
        return 0.0 if self.balance is None else self.balance.plain_s

    def about(self) -> str:
        """As `Drafting.about`, with the numbers of rows that were worth a recording until now."""
        if self.recordings is None:
            return super().about()
        return f"{super().about()}; recorded: {', '.join(map(str, self.recordings.ready)) or 'none'}"

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a sequence with the prompt's tokens."""
        self.prompt, self.new = list(prompt), []
        if self.recordings is not None:
            self.recordings.begin()
        if self.allowed or self.recordings is not None:
            self._feed()
        self.once = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model drew."""
        self.new += tokens

    def wants(self, left: int) -> int:
        """The number of drafts that the next step should have, by the present estimates; 0 where a plain step is faster. left:
        tokens that may still be generated."""
        if not self.allowed:
            return 0
        self._feed()
        self.guess = self.host.guess(min(self.widths[-1], left) - 1)
        # plain steps of small models wait for the host, which a table of the device's time does not know
        plain = max(1.0, self.plain_s / self.step_s)
        plain = self.costs(SAME_ROWS) if self.same else plain
        if self.recordings is not None:
            return self.recordings.choose(self.guess, self.costs, self.apart, plain)
        return worth(self.guess, self.costs, self.widths, self.apart, plain)

    def launch(self, left: int) -> "tuple[torch.Tensor, int]":
        """Launch a step; returns its output tensor, and the number of its drafts. left: as of `wants`."""
        n, self.since = self.wants(left), time.perf_counter()
        if not n:
            return self.plain(), 0
        rows = next(w for w in (self.widths if self.recordings is None else self.recordings.ready) if w > n)
        return self._verify(self.guess.tokens[:n], rows), n

    def read(self, found: list[int], n: int) -> list[int]:
        """The next tokens, from the output `found` of a step with n drafts."""
        self.rows, self.since = max(1, len(found) - 1), self._began()
        if n:
            self._count(n, found[0])
        if len(found) > 1:
            found = found[1 : found[0] + 2]  # drafts in the dummy rows may be right too
        self.extend(found)
        return found

    def meanwhile(self) -> None:
        """Do work that can wait, until about when the step on the device has ended; one with drafts takes longer than this."""
        if self.recordings is not None and self.recordings.slices is not None:
            self.once = True
            self.recordings.meanwhile(self.since + self.plain_s)

    def _began(self) -> float:
        """When the device began the step after the one that was read: at the latest now, and earlier where the host is late."""
        now = time.perf_counter()
        if self.recordings is None or self.recordings.slices is None:
            return now
        return min(now, self.since + self.plain_s)

    def after(self, tokens: int, left: int) -> None:
        """Consider what to record, after a step with so many new tokens. left: tokens that may still be generated."""
        if self.recordings is not None:
            self.recordings.note(tokens, left, self.plain_s > 0)

    def _feed(self) -> None:
        if self.prompt:
            self.host.begin(self.prompt)
            self.prompt, self.once = [], True
        if self.new:
            self.host.extend(self.new)
            self.new = []


class OnDevice(Drafting):
    """Drafts that the previous step makes on the device: the host launches a step before it reads the last one."""

    ahead = True

    def __init__(self, drafter: DeviceDrafter, decoder: Any, same: bool = False) -> None:
        super().__init__(drafter, decoder, same)
        self.widths = tuple(w for w in self.widths if w <= drafter.most + 1 or self.same)
        share = step_s(drafter.plan) / step_s(decoder.plan)
        rows = self.timed or self.costs
        self.costs = lambda n: rows(n) + (0.0 if self.timed is not None and n in self.timed.times else (n - 1) * share)
        self.rates = Rates([BEFORE] * drafter.most)
        if self.timed is not None:  # a guess on a CPU may take as long as ten plain steps of a small model
            self.balance = decoder.balances.setdefault(drafter.name, Balance(ENOUGH + 1))
        self.idle, self.trying, self.stale = 0, 0, False

    def launch(self) -> tuple["torch.Tensor", int, bool]:
        """Launch a step; returns its output tensor, its rows, and whether its drafts were made by the step right before it.

        One row means a plain step. The guesses after a plain step are stale, so a retried drafter gets two steps.
        """
        if self.same:
            return self._verify((), SAME_ROWS), SAME_ROWS, True
        if not self.allowed or (self.timed is not None and self.timed.tried.get(1, 0) < ENOUGH):
            self.stale = True
            return self.decoder.step(), 1, False
        chances = self.rates.chances
        drafts = worth(Guess([0] * len(chances), chances), self.costs, self.widths)
        if not drafts and self.idle >= AGAIN:
            self.idle, self.trying = 0, 2
        if not drafts and not self.trying:
            self.idle, self.stale = self.idle + 1, True
            return self.decoder.step(), 1, False
        self.trying = max(0, self.trying - 1)
        rows = next(w for w in self.widths if w > (drafts or self.widths[0] - 1))
        stale, self.stale = self.stale, False
        return self._verify((), rows), rows, not stale

    def read(self, found: list[int], rows: int, fresh: bool) -> list[int]:
        """The next tokens, from the output `found` of a step of `rows` rows. fresh: whether its drafts were not stale."""
        self.rows = rows
        if rows == 1:
            return found
        accepted, drafts = found[0], rows - 1
        if fresh:
            self.rates.note(drafts, accepted)
        self._count(drafts, accepted)
        return found[1 : accepted + 2]


def step_s(plan: Any) -> float:
    """An estimate of the seconds of a plan's step, from facts that are the same in every run."""
    tensors = [*plan.linears.parameters(), *plan.linears.buffers()]
    return sum(t.nbytes for t in tensors) / READ + (len(plan.states) or 1) * LAYER_S


def is_dense(plan: Any) -> bool:
    """Whether rows of one sequence cost little more than one: rows of mixtures read other experts, and recurrent layers need a
    state per draft."""
    experts = any(isinstance(step, Experts) for step in plan.steps)
    return not experts and not any(isinstance(spec, Recurrent) for spec in plan.states)


def is_large(plan: Any) -> bool:
    """Whether a dense plan's steps are so long that the host has time for other work in a plain one."""
    return is_dense(plan) and step_s(plan) >= LARGE * GAP_S


def estimated(plan: Any) -> Costs:
    """The costs of steps with drafts on a GPU, from the plan alone; `Balance` times whether such steps pay at all."""
    jump = (len(plan.states) or 1) * WIDE_LAYER_S / step_s(plan)
    return TableCosts({1: 1.0, 2: 1 + jump} | {rows: 1 + jump + ROW * (rows - 2) for rows in WIDTHS["cuda"]})
