"""How many drafts a step is worth: what they are expected to bring, over what their rows cost."""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

from lowq_cli.engine.drafts.drafter import Guess

GAIN = 1.05  # times faster than plain steps that a step with drafts has to be
ENOUGH = 4  # steps of a width whose times are believed: one alone may have waited for another process
LAST = 9  # steps of a width whose times count
AGAIN = 256  # plain steps after which every width may be tried once more


class Costs(Protocol):
    """What a step of so many rows takes, in steps of one row."""

    def __call__(self, rows: int) -> float: ...


class TableCosts:
    """By a table of rows -> cost, linear between its rows. It does not depend on what was timed: the same every time."""

    def __init__(self, table: dict[int, float]) -> None:
        self.table = sorted(table.items())

    def __call__(self, rows: int) -> float:
        below = max((p for p in self.table if p[0] <= rows), default=(1, 1.0))
        above = min((p for p in self.table if p[0] >= rows), default=below)
        if above[0] == below[0]:
            return below[1] * max(1.0, rows / below[0])
        return below[1] + (above[1] - below[1]) * (rows - below[0]) / (above[0] - below[0])


class TimedCosts:
    """By the median time of the last steps of each width: beside other processes a step with more rows may wait longer. Widths
    of which little is known cost what `before` says, if that is less, beside those of which much is: so each is tried."""

    def __init__(self, before: Costs) -> None:
        self.before, self.times, self.tried = before, dict[int, deque[float]](), dict[int, int]()
        self.plain = 0

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long; the first of a width also prepares it, and does not count."""
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
    """Drafts of a guess to check, 0 for a plain step: as many as bring the most tokens for what their step costs.

    widths: rows that a step may have, ascending; where it has more than drafts, the rest fill up. apart: what a step with
    drafts costs beside its rows, in plain steps.
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
