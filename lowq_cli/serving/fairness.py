"""The order in which waiting requests are served when more are open than can be computed at once.

The next request is the one with the longest wait relative to the work it asks for: for a few tokens, a short wait counts as
long. A short request does not wait for a long one to end: once its relative wait is longer, it preempts the long one, which
continues later from where it was. So a request for a few tokens waits for about as few, even if others asked for thousands
before; requests of equal length keep the order of arrival; and no request waits for ever, because its relative wait grows ahead
of later ones.

Clients are distinguished by their address. The work of a client's request is multiplied by the number of its open requests, so
that sixty requests of one client together get as many turns as one request of another client.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from lowq_cli.serving.request import Request

LONG = 1024  # max. tokens that an answer counts as: most answers end before their limit
SHORTER = 4  # a running request gives way only if it has this many times the work left that the waiting one asks for
READ = 64  # prompt tokens that take about as long as one token of an answer


class Queued(Protocol):
    """A request and its wait, in steps of an engine. since: the step at which it began to wait; waited: sum of earlier waits.

    first: whether it comes before all others, because it was running and was preempted for lack of blocks.
    """

    request: Request
    since: int
    waited: int
    first: bool


Q = TypeVar("Q", bound=Queued)


class Turns:
    """The order of requests at one moment.

    Args:
        known: all waiting and running requests. now: the current step.
    """

    def __init__(self, known: Iterable[Queued], now: int) -> None:
        self.now, self.open = now, Counter(q.request.client for q in known)

    def next(self, waiting: Collection[Q]) -> Q:
        """Return the next of these waiting requests, which are in order of arrival."""
        return max(waiting, key=self._waits)

    def gives_way(self, text: Queued, running: Sequence[tuple[Q, int]]) -> Q | None:
        """Return the running request, of (request, tokens left) pairs, that `text` preempts, or None if it has to wait."""
        if not running:
            return None
        longest, left = max(running, key=lambda r: min(r[1], LONG) * self.open[r[0].request.client])
        much_longer = min(left, LONG) * self.open[longest.request.client] >= SHORTER * self._asks(text)
        had = longest.waited / self._asks(longest)
        return longest if much_longer and self._waits(text) > had else None

    def _waits(self, q: Queued) -> float:
        """Return a request's wait relative to the work it asks for."""
        return float("inf") if q.first else (q.waited + self.now - q.since) / self._asks(q)

    def _asks(self, q: Queued) -> float:
        request = q.request
        return (min(request.max_tokens, LONG) + len(request.prompt) / READ) * self.open[request.client]
