"""One text that is decoded with drafts: what is drafted for its next step, and what came of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowq_cli.engine.drafts.pace import Costs, TableCosts, TimedCosts, worth
from lowq_packers.lazy import torch

if TYPE_CHECKING:
    from lowq_cli.engine.drafts.drafter import Guess, HostDrafter

# rows of steps with drafts: each has a recording of its own, so on a GPU they are few
WIDTHS = {"cuda": (4, 8, 16), "cpu": (2, 3, 4, 6, 8, 12, 16)}
# what a step of so many rows takes, in steps of one. On a GPU it is not timed: which kernels take a row decides on its last
# bits, and the same seed is to give the same text
COSTS = {"cuda": {1: 1.0, 2: 1.1, 4: 1.15, 8: 1.24, 16: 1.38}, "cpu": {1: 1.0, 2: 1.2, 16: 3.0}}
GAP_S = 60e-6  # from a step's end until the next is launched, where its drafts depend on what came out
READ = 2.5e12  # bytes of weights that a GPU reads in a second, about
LAYER_S = 10e-6  # of a layer, beside reading its weights


class Drafting:
    """Steps of a decoder's one text.

    Attributes:
        drafted, accepted: tokens. steps: those with drafts.
    """

    def __init__(self, drafter: "HostDrafter", decoder: Any) -> None:
        self.drafter, self.decoder = drafter, decoder
        kind = decoder.device.type
        self.widths, costs = WIDTHS[kind], TableCosts(COSTS[kind])
        self.timed = TimedCosts(costs) if kind == "cpu" else None
        self.costs: Costs = self.timed or costs
        self.apart = GAP_S / _step_s(decoder) if kind == "cuda" else 0.0
        self.drafted = self.accepted = self.steps = self.rows = 0

    def about(self) -> str:
        """What drafts, and what steps with drafts cost, for `--explain`."""
        costs = ", ".join(f"{w}: {self.costs(w):.2f}" for w in self.widths)
        return f"{self.drafter.name}; steps of so many rows cost, in plain steps, {costs}"

    def numbers(self, tokens: int, steps: int) -> dict[str, Any]:
        """What came of it in so many tokens after the first, by so many steps of every kind."""
        counts = {"drafter": self.drafter.name, "drafted": self.drafted, "accepted": self.accepted, "steps": self.steps}
        return counts | {"tokens_per_step": round(tokens / max(steps, 1), 3)}

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        self.drafter.extend(tokens)

    def wants(self, left: int) -> bool:
        """Whether the next step, of a text that has room for so many tokens, would rather have drafts, as far as is known."""
        return bool(self._worth(self.drafter.guess(min(self.widths[-1], left) - 1)))

    def step(self, left: int) -> list[int] | None:
        """The text's next tokens by a step with drafts; None where a plain one is faster."""
        guess = self.drafter.guess(min(self.widths[-1], left) - 1)
        n = self._worth(guess)
        if not n:
            return None
        self.rows = next(w for w in self.widths if w > n)
        found = self.decoder.verify(guess.tokens[:n], self.rows)
        whole = torch.cat((found.accepted, found.drawn)).tolist()
        tokens = whole[1 : whole[0] + 2]  # what fills the rows up may be right, too
        self.steps, self.drafted, self.accepted = self.steps + 1, self.drafted + n, self.accepted + min(n, len(tokens) - 1)
        self.extend(tokens)
        return tokens

    def took(self, drafts: bool, seconds: float) -> None:
        """The last step, with drafts or without, took so long until the next could begin."""
        if self.timed is not None:
            self.timed.note(self.rows if drafts else 1, seconds)

    def _worth(self, guess: "Guess") -> int:
        return worth(guess, self.costs, self.widths, self.apart)


def _step_s(decoder: Any) -> float:
    """Seconds of a step, about, from what does not change between two runs."""
    tensors = [*decoder.linears.parameters(), *decoder.linears.buffers()]
    return sum(t.nbytes for t in tensors) / READ + len(decoder.plan.states) * LAYER_S
