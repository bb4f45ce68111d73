"""How many drafts a step of `generate` checks: by expected tokens and the rows' cost. Server: serving/draft_budget.py."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess

STEP_GAIN = 1.05  # a step with drafts must yield this many times the tokens per second of plain steps
ENOUGH = 4  # min. timed steps of a width before its median counts: a single one may have waited for another process
LAST = 9  # the median is over this many last steps of a width
AGAIN = 256  # plain steps after which every width may be tried again


class Costs(Protocol):
    """The time of a step of `rows` rows, in steps of one row."""

    def __call__(self, rows: int) -> float: ...


class TableCosts:
    """Costs from a table rows -> cost, interpolated linearly. They do not depend on timings, so every run has the same. level:
    whether rows beyond either end of the table cost what that end does."""

    def __init__(self, table: dict[int, float], level: bool = False) -> None:
        self.table, self.level = sorted(table.items()), level
        self.costs = dict[int, float]()  # those that were asked for: each step asks for several

    def __call__(self, rows: int) -> float:
        if rows not in self.costs:
            self.costs[rows] = self._cost(rows)
        return self.costs[rows]

    def _cost(self, rows: int) -> float:
        if self.level:
            rows = min(max(rows, self.table[0][0]), self.table[-1][0])
        below = max((p for p in self.table if p[0] <= rows), default=(1, 1.0))
        above = min((p for p in self.table if p[0] >= rows), default=below)
        if above[0] == below[0]:
            return below[1] * max(1.0, rows / below[0])
        return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])


class TimedCosts:
    """Costs from the median time of each width's last steps.

    The additional cost of a width with few timings is that of `before`, times the ratio by which its neighbours differ from
    `before`, or its median if that is less; so each is tried. before: costs above 1 for more than one row.
    """

    def __init__(self, before: Costs) -> None:
        self.before, self.times, self.tried = before, dict[int, deque[float]](), dict[int, int]()
        self.plain = 0
        self._median, self._costs = dict[int, float](), dict[int, float]()  # rows -> s; rows -> cost, until the next timing

    def note(self, rows: int, seconds: float) -> None:
        """Record the time of a step of `rows` rows; the first step of a width also prepares it, so its time is dropped."""
        tried = self.tried[rows] = self.tried.get(rows, -1) + 1
        if tried:
            times = self.times.setdefault(rows, deque(maxlen=LAST))
            times.append(seconds)
            self._median[rows] = sorted(times)[len(times) // 2]
        self.plain += rows == 1
        if self.plain == AGAIN:
            self.plain, self.tried = 0, {n: min(t, ENOUGH - 1) for n, t in self.tried.items()}
        self._costs.clear()

    def __call__(self, rows: int) -> float:
        if rows not in self._costs:
            self._costs[rows] = self._cost(rows)
        return self._costs[rows]

    def _cost(self, rows: int) -> float:
        if self.tried.get(1, 0) < ENOUGH:
            return self.before(rows)
        cost = {n: s / self._median[1] for n, s in self._median.items()}
        costs = {n: c for n, c in cost.items() if self.tried[n] >= ENOUGH}
        if rows in costs:
            return costs[rows]
        ratios = {n: max(0.0, c - 1) / (self.before(n) - 1) for n, c in costs.items() if n > 1}
        ratio = TableCosts(ratios, level=True)(rows) if ratios else 1.0
        return min(1 + (self.before(rows) - 1) * ratio, cost.get(rows, math.inf))


def worth(guess: Guess, costs: Costs, widths: Sequence[int], apart: float = 0.0, plain: float = 1.0) -> int:
    """The number of drafts to check, 0 for a plain step: the number with the most expected tokens per cost, as of `most`."""
    return most(guess, costs, widths, apart, plain)[0]


def most(guess: Guess, costs: Costs, widths: Sequence[int], apart: float = 0.0, plain: float = 1.0) -> tuple[int, float]:
    """The number of drafts with the most expected tokens per cost, 0 for a plain step; and these tokens per cost.

    widths: the row counts that a step may have, ascending; surplus rows are dummies. apart: the cost of a step with drafts in
    addition to its rows. plain: the cost of a plain step, as the clock has it, in the unit of `costs`.
    """
    best, drafts, tokens, sure, known = STEP_GAIN / plain, 0, 1.0, 1.0, 0  # plain steps count a little better than they are
    for rows in widths:
        while known < min(rows - 1, len(guess.chances)):
            sure *= guess.chances[known]
            tokens += sure
            known += 1
        if tokens > best * (costs(rows) + apart):
            best, drafts = tokens / (costs(rows) + apart), known
        if known == len(guess.chances):
            break
    return drafts, best if drafts else 1 / plain
