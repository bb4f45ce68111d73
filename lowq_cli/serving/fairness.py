"""Whose turn it is, where more is asked for than can be computed at once.

Next comes the request whose wait is longest beside what it asks for: for a few tokens, a short wait is long. And a short one
does not wait for a long one to end: where it has waited for longer in that sense, it takes its place, and the long one goes on
later from where it was. So a request of a few tokens waits for a few, whoever asked for thousands before; requests of one
length keep the order in which they came; nobody waits for ever, as every wait grows beside that of those who come later.

Clients are told apart by the address that they come from. What one asks for counts as often as it has requests open, so that
sixty requests of one client have together the turns of one of another's.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from lowq_cli.serving.request import Request

LONG = 1024  # tokens, as which every longer answer counts: most end before the bound that they are given
SHORTER = 4  # times that a text must have more left than another asks for to give it its place
READ = 64  # tokens of a prompt that take as long as one of an answer, about


class Queued(Protocol):
    """A request and its place in time. since: when it began to wait; waited: how long it had before, in the steps of an engine.

    first: whether it comes before all others, as it was begun and has lost its room.
    """

    request: Request
    since: int
    waited: int
    first: bool


Q = TypeVar("Q", bound=Queued)


class Turns:
    """The order of requests at one moment.

    Args:
        known: all that wait or run. now: the step.
    """

    def __init__(self, known: Iterable[Queued], now: int) -> None:
        self.now, self.open = now, Counter(q.request.client for q in known)

    def next(self, waiting: Collection[Q]) -> Q:
        """The one that comes next of those that wait, which are in the order in which they came."""
        return max(waiting, key=self._waits)

    def gives_way(self, text: Queued, running: Sequence[tuple[Q, int]]) -> Q | None:
        """The one of those that run, with the tokens that each has left, whose place a text takes; None: it waits for one."""
        if not running:
            return None
        longest, left = max(running, key=lambda r: min(r[1], LONG) * self.open[r[0].request.client])
        much_longer = min(left, LONG) * self.open[longest.request.client] >= SHORTER * self._asks(text)
        had = longest.waited / self._asks(longest)
        return longest if much_longer and self._waits(text) > had else None

    def _waits(self, q: Queued) -> float:
        """How long one has waited beside what it asks for."""
        return float("inf") if q.first else (q.waited + self.now - q.since) / self._asks(q)

    def _asks(self, q: Queued) -> float:
        request = q.request
        return (min(request.max_tokens, LONG) + len(request.prompt) / READ) * self.open[request.client]
