"""One text that is decoded with drafts: how many its next step checks, and what came of it."""

from collections.abc import Sequence
from typing import Any

from lowq_cli.engine.drafts.draft_length import ENOUGH, Costs, TableCosts, TimedCosts, worth
from lowq_cli.engine.drafts.drafter import DeviceDrafter, Guess, HostDrafter
from lowq_packers.lazy import torch

# rows of steps with drafts: each has a recording of its own, so on a GPU they are few
WIDTHS = {"cuda": (4, 8, 16), "cpu": (2, 3, 4, 6, 8, 12, 16)}
# what a step of so many rows takes, in steps of one. On a GPU it is not timed: which kernels take a row decides on its last
# bits, and the same seed is to give the same text: an 8B's by 4 bits on an H100
COSTS = {"cuda": {1: 1.0, 2: 1.26, 4: 1.26, 8: 1.38, 16: 1.64}, "cpu": {1: 1.0, 2: 1.2, 16: 3.0}}
GAP_S = 150e-6  # from a step's end until the next is launched, where its drafts depend on what came out
READ = 2.5e12  # bytes of weights that a GPU reads in a second, about
LAYER_S = 10e-6  # of a layer, beside reading its weights
FADE = 0.95  # of a device drafter's counts at each step
BEFORE, WEIGHT = 0.75, 4.0  # share of its guesses taken to be right before any was checked, and the guesses that it counts for
AGAIN = 64  # plain steps after which a device drafter that was not worth it is tried again


class Drafting:
    """Steps of a decoder's one text.

    Attributes:
        drafted, accepted: tokens. steps: those with drafts. ahead: whether a step may be launched before the one before it is
        read, as drafts are made on the device.
    """

    ahead = False

    def __init__(self, drafter: HostDrafter | DeviceDrafter, decoder: Any) -> None:
        self.drafter, self.decoder = drafter, decoder
        kind = decoder.device.type
        self.widths, costs = WIDTHS[kind], TableCosts(COSTS[kind])
        self.timed = TimedCosts(costs) if kind == "cpu" else None
        self.costs: Costs = self.timed or costs
        self.apart = 0.0
        self.drafted = self.accepted = self.steps = self.rows = 0

    def about(self) -> str:
        """What drafts, and what steps with drafts cost, for `--explain`."""
        costs = ", ".join(f"{w}: {self.costs(w):.2f}" for w in self.widths)
        return f"{self.drafter.name}; steps of so many rows cost, in plain steps, {costs}"

    def numbers(self, tokens: int, steps: int) -> dict[str, Any]:
        """What came of it in so many tokens after the first, by so many steps of every kind."""
        counts = {"drafter": self.drafter.name, "drafted": self.drafted, "accepted": self.accepted, "steps": self.steps}
        return counts | {"tokens_per_step": round(tokens / max(steps, 1), 3)}

    def took(self, drafts: bool, seconds: float) -> None:
        """The last step, with drafts or without, took so long until the next could begin."""
        if self.timed is not None:
            self.timed.note(self.rows if drafts else 1, seconds)

    def _count(self, drafts: int, accepted: int) -> None:
        self.steps, self.drafted, self.accepted = self.steps + 1, self.drafted + drafts, self.accepted + min(drafts, accepted)


class FromHost(Drafting):
    """Drafts that the host makes of the tokens: a step with drafts is launched once those before are read."""

    def __init__(self, drafter: HostDrafter, decoder: Any) -> None:
        super().__init__(drafter, decoder)
        self.host = drafter
        self.apart = GAP_S / step_s(decoder.plan) if decoder.ahead else 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        """The text begins with these."""
        self.host.begin(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """The model goes on with these."""
        self.host.extend(tokens)

    def wants(self, left: int) -> bool:
        """Whether the next step, of a text that has room for so many tokens, would rather have drafts, as far as is known."""
        return bool(self._worth(self.host.guess(min(self.widths[-1], left) - 1)))

    def step(self, left: int) -> list[int] | None:
        """The text's next tokens by a step with drafts; None where a plain one is faster."""
        guess = self.host.guess(min(self.widths[-1], left) - 1)
        n = self._worth(guess)
        if not n:
            return None
        self.rows = next(w for w in self.widths if w > n)
        accepted, *drawn = self.decoder.verify(guess.tokens[:n], self.rows).result.tolist()
        self._count(n, accepted)
        tokens = drawn[: accepted + 1]  # what fills the rows up may be right, too
        self.extend(tokens)
        return tokens

    def _worth(self, guess: Guess) -> int:
        return worth(guess, self.costs, self.widths, self.apart)


class OnDevice(Drafting):
    """Drafts that are made in the step before: the host launches a step before it has read the last one."""

    ahead = True

    def __init__(self, drafter: DeviceDrafter, decoder: Any) -> None:
        super().__init__(drafter, decoder)
        self.widths = tuple(w for w in self.widths if w <= drafter.most + 1)
        own = step_s(drafter.plan) / step_s(decoder.plan)
        if self.timed is not None:  # of all texts: each that begins would else take plain steps first, to know what they take
            self.timed = decoder.timed.setdefault(drafter.name, self.timed)
        rows = self.timed or self.costs
        self.costs = lambda n: rows(n) + (0.0 if self.timed is not None and n in self.timed.times else (n - 1) * own)
        self.right, self.tried = [BEFORE * WEIGHT] * drafter.most, [WEIGHT] * drafter.most
        self.idle, self.trying, self.stale = 0, 0, False

    def launch(self) -> tuple["torch.Tensor", int, bool]:
        """Launch a step: where it puts what it draws, its rows, and whether its drafts are guesses of the step right before.

        One row is a plain step. After it the guesses are of no use, so who is tried again has two steps.
        """
        chances = [r / t for r, t in zip(self.right, self.tried, strict=True)]
        drafts = worth(Guess([0] * len(chances), chances), self.costs, self.widths)
        if self.timed is not None and self.timed.tried.get(1, 0) < ENOUGH:
            self.stale = True
            return self.decoder.step(), 1, False
        if not drafts and self.idle >= AGAIN:
            self.idle, self.trying = 0, 2
        if not drafts and not self.trying:
            self.idle, self.stale = self.idle + 1, True
            return self.decoder.step(), 1, False
        self.trying = max(0, self.trying - 1)
        rows = next(w for w in self.widths if w > (drafts or self.widths[0] - 1))
        stale, self.stale = self.stale, False
        return self.decoder.verify((), rows).result, rows, not stale

    def read(self, found: list[int], rows: int, fresh: bool) -> list[int]:
        """The text's next tokens, of what a step of so many rows has put there."""
        self.rows = rows
        if rows == 1:
            return found
        accepted, drafts = found[0], rows - 1
        for i in range(min(accepted + 1, drafts) if fresh else 0):
            self.right[i], self.tried[i] = FADE * self.right[i] + (i < accepted), FADE * self.tried[i] + 1
        self._count(drafts, accepted)
        return found[1 : accepted + 2]


def step_s(plan: Any) -> float:
    """Seconds of a step of a plan, about, from what does not change between two runs."""
    tensors = [*plan.linears.parameters(), *plan.linears.buffers()]
    return sum(t.nbytes for t in tensors) / READ + (len(plan.states) or 1) * LAYER_S
