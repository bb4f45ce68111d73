"""How long passes take, as measured, and how many prompt tokens one may carry so that nobody's stream stalls."""

from collections.abc import Sequence

SLACK = 2.5  # times a step: what a pass with prompt tokens may take, so that 3 times the median is the exception
NEWEST = 0.2  # weight of the newest pass in `extra`


class Pace:
    """Seconds of passes by (rows that step, all rows): equal where no prompt tokens ride along.

    Args:
        totals: rows of the passes that carry prompt tokens, ascending.
    Attributes:
        known: the fewest seconds that were seen of each: with little in the cache.
        extra: what passes take beyond that now, whatever their size: attention over the texts that run.
    """

    def __init__(self, totals: Sequence[int]) -> None:
        self.totals = totals
        self.known: dict[tuple[int, int], float] = {}
        self.extra = 0.0

    def note(self, steps: int, rows: int, seconds: float) -> None:
        """A pass of so many rows, of which so many step, took so long."""
        if steps != rows:
            size = next((t for t in self.totals if t >= rows), self.totals[-1])
            rows, seconds = size, seconds * size / rows
        least = self.known[steps, rows] = min(seconds, self.known.get((steps, rows), seconds))
        self.extra += NEWEST * (seconds - least - self.extra)

    def seconds(self, steps: int, rows: int) -> float:
        """What a pass takes; one of which nothing is known as the nearest that is known, in proportion; `extra` without any."""
        alike = [key for key in self.known if (key[0] == key[1]) == (steps == rows)]
        if not alike:
            return self.extra
        nearest = min(alike, key=lambda key: (abs(key[1] - rows), abs(key[0] - steps)))
        return self.known[nearest] * max(1.0, rows / nearest[1] if steps != rows else 1.0) + self.extra

    def budget(self, step: int, riding: int, waiting: int) -> int:
        """Prompt tokens of the next pass, of `waiting` ones, which carries `riding` rows that step.

        step: rows of a step once all who wait are running, 0 where nobody runs. As many as take SLACK times such a step, all of
        them where nobody runs; at least what the smallest pass has room for.
        """
        sizes = [t for t in self.totals if t > riding]
        allowed = SLACK * self.seconds(step, step) if step else float("inf")
        fitting = [t for t in sizes if self.seconds(riding, t) <= allowed] or sizes[:1]
        return min(fitting[-1] - riding, waiting)
