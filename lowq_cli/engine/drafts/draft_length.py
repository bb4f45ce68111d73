"""The number of drafts to check in a step: the expected tokens divided by the cost of the step's rows."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess

GAIN = 1.05  # a step with drafts must yield this many times the tokens per second of plain steps
ENOUGH = 4  # min. timed steps of a width before its median counts: a single one may have waited for another process
LAST = 9  # the median is over this many last steps of a width
AGAIN = 256  # plain steps after which every width may be tried again


class Costs(Protocol):
    """The time of a step of `rows` rows, in steps of one row."""

    def __call__(self, rows: int) -> float: ...


class TableCosts:
    """Costs from a table rows -> cost, interpolated linearly. They do not depend on timings, so every run has the same."""

    def __init__(self, table: dict[int, float]) -> None:
        self.table = sorted(table.items())

    def __call__(self, rows: int) -> float:
        below = max((p for p in self.table if p[0] <= rows), default=(1, 1.0))
        above = min((p for p in self.table if p[0] >= rows), default=below)
        if above[0] == below[0]:
            return below[1] * max(1.0, rows / below[0])
        return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])


class TimedCosts:
    """Costs from the median time of each width's last steps, since on a busy machine wider steps may wait longer. A width with
    few timings costs what its neighbours, or at first `before`, suggest, or its median if that is less; so each is tried."""

    def __init__(self, before: Costs) -> None:
        self.before, self.times, self.tried = before, dict[int, deque[float]](), dict[int, int]()
        self.plain = 0

    def note(self, rows: int, seconds: float) -> None:
        """Record the time of a step of `rows` rows; the first step of a width also prepares it, so its time is dropped."""
        tried = self.tried[rows] = self.tried.get(rows, -1) + 1
        if tried:
            self.times.setdefault(rows, deque(maxlen=LAST)).append(seconds)
        self.plain += rows == 1
        if self.plain == AGAIN:
            self.plain, self.tried = 0, {n: min(t, ENOUGH - 1) for n, t in self.tried.items()}

    def __call__(self, rows: int) -> float:
        if self.tried.get(1, 0) < ENOUGH:
            return self.before(rows)
        each = {n: median(times) for n, times in self.times.items()}
        known = {n: s / each[1] for n, s in each.items() if self.tried[n] >= ENOUGH}
        if rows in known:
            return known[rows]
        cost = self.before(rows) if len(known) == 1 else TableCosts(known)(rows)
        return min(cost, each[rows] / each[1]) if rows in each else cost


def worth(guess: Guess, costs: Costs, widths: Sequence[int], apart: float = 0.0) -> int:
    """The number of drafts to check, 0 for a plain step: the number with the most expected tokens per cost.

    widths: the row counts that a step may have, ascending; surplus rows are dummies. apart: the cost of a step with drafts in
    addition to its rows, in plain steps.
    """
    best, drafts, tokens, sure, known = GAIN, 0, 1.0, 1.0, 0
    for rows in widths:
        while known < min(rows - 1, len(guess.chances)):
            sure *= guess.chances[known]
            tokens += sure
            known += 1
        if tokens > best * (costs(rows) + apart):
            best, drafts = tokens / (costs(rows) + apart), known
        if known == len(guess.chances):
            break
    return drafts
