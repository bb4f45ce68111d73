"""How long passes with drafts take: measured beforehand where they are recorded, otherwise estimated from those that ran."""

import statistics
from collections import deque

from lowq_cli.engine.drafts.drafter import PagedDrafter
from lowq_cli.engine.drafts.drafting import step_s
from lowq_cli.engine.plan import Plan
from lowq_cli.serving.draft_passes import DraftPasses

GAP_S = 4e-4  # initial estimate of the seconds between the end of a pass and the launch of a pass with drafts
NEWEST = 0.1  # weight of the newest measurement in the moving average of these seconds
ROW = 0.4  # initial estimate of the extra time of a pass with twice the rows, as a fraction of a plain pass
# Passes in a row that could have had likely drafts and were not worth it, after which the measurements from passes with drafts
# start over: none would run that corrects them. They may come from another number of sequences, or from a delay of the host.
AGAIN = 64
SLOPES = 15  # passes with drafts on a CPU over which the median is taken: other processes slow down single passes


class DraftCosts:
    """The seconds of passes with drafts and of guesses, next to those of plain passes.

    Args:
        passes: the model's passes with drafts. drafter: what guesses after passes, or None. plan: the model's plan.
    Attributes:
        adapted: whether the pass to come is one with LoRA adapters.
        gap_s: seconds from the end of a pass until the host launches one with drafts that needs its result; 0 on a CPU, where
            nothing overlaps. late_s: the same of a pass that does not need it, and is launched before.
    """

    def __init__(self, passes: DraftPasses, drafter: PagedDrafter | None, plan: Plan) -> None:
        self.passes, self.budget = passes, passes.passes.token_budget
        self.gap_s, self.late_s = GAP_S if passes.device.type == "cuda" else 0.0, 0.0
        self.adapted = False
        self.extra = 0.0  # seconds that recorded passes take beyond those measured at the start, with little in the cache
        self._refused = self._unread = 0  # passes in a row, as AGAIN counts them; and such that did not wait for a result
        self._slopes = deque([ROW] * 3, maxlen=SLOPES)
        share = 0.0 if drafter is None else step_s(drafter.plan) / step_s(plan)
        self._guesses, self._reads = (deque([share] * 3, maxlen=SLOPES) for _ in range(2))

    def plain_s(self, texts: int) -> float:
        """Return the seconds of a plain pass of so many sequences, 0.0 where none is known yet."""
        size = self.passes.passes.sizes.bucket(texts)
        return self.budget.seconds(size, size, self.adapted)

    def guess_s(self, plain_s: float) -> float:
        """Return the seconds of one guess for each sequence, where a plain pass takes `plain_s` seconds."""
        return plain_s * statistics.median(self._guesses)

    def read_s(self, plain_s: float) -> float:
        """Return the seconds in which the drafter reads a pass; 0.0 without one on the device."""
        return plain_s * statistics.median(self._reads)

    def pass_s(self, rows: int, texts: int, plain_s: float) -> float:
        """Return the seconds of a pass with drafts of `rows` rows for `texts` sequences."""
        if known := self.passes.seconds.get((rows, self.adapted)):
            return known + (self.extra or self.budget.extra)
        return plain_s * (1 + statistics.median(self._slopes) * (rows / texts - 1))

    def known_s(self, rows: int) -> float:
        """Return the seconds of a recorded pass for this many rows; 0.0 where it was not timed."""
        known = self.passes.seconds.get((self.passes.size(rows), self.adapted))
        return known + (self.extra or self.budget.extra) if known else 0.0

    def chosen(self, some: bool) -> None:
        """Record whether a pass that could have likely drafts has some."""
        self._refused = 0 if some else self._refused + 1
        if self._refused == AGAIN:
            self.gap_s, self.late_s, self.extra, self._refused = min(self.gap_s, GAP_S), 0.0, 0.0, 0

    def waited(self, some: bool) -> None:
        """Record whether a pass waits for a result where it might have better drafts after it."""
        self._unread = 0 if some else self._unread + 1
        if self._unread == AGAIN:
            self.gap_s, self._unread = min(self.gap_s, GAP_S), 0

    def launched(self, seconds: float, ahead: bool) -> None:
        """Record the seconds from the end of a pass to the launch of one with drafts, as the host saw them. ahead: whether it
        was launched before the result of the other was read."""
        if ahead:
            self.late_s += NEWEST * (seconds - self.late_s)
        else:
            self.gap_s += NEWEST * (seconds - self.gap_s)

    def passed(self, texts: int, rows: int, seconds: float, adapted: bool) -> None:
        """Record the seconds of a pass with drafts."""
        if known := self.passes.seconds.get((self.passes.size(rows), adapted)):
            extra = self.extra or self.budget.extra
            self.extra = max(0.0, extra + NEWEST * (seconds - known - extra))
            return
        plain = self.budget.seconds(texts, texts, adapted)
        if plain and not self.passes.passes.sizes.padded:
            self._slopes.append(max(0.0, seconds / plain - 1) / (rows / texts - 1))

    def followed(self, texts: int, K: int, seconds: float) -> None:
        """Record the seconds in which a drafter read a pass without prompts and made K guesses for each sequence."""
        plain = self.plain_s(texts)
        if plain and not K:
            self._reads.append(seconds / plain)
        elif plain:
            self._guesses.append(max(0.0, seconds - self.read_s(plain)) / (K * plain))
