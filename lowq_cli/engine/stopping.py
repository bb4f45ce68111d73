"""Texts that end a generation: what comes after is dropped, and what may be the beginning of one is not shown yet."""

from collections.abc import Sequence

from lowq_packers.errors import UsageError


def check(stops: Sequence[str]) -> tuple[str, ...]:
    """The texts as a tuple. Raises UsageError for an empty one, which would end every text at once."""
    if "" in stops:
        raise UsageError("a text to stop at is empty; leave --stop out, or name some text")
    return tuple(stops)


class Stopper:
    """A sequence's text on its way out. `push` takes a piece; it returns what may be shown, and whether the text has ended."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = self.met = ""  # met: the stop that ended the text

    def push(self, piece: str) -> tuple[str, bool]:
        """What is certain now, without the stop itself; True from the first stop on."""
        if not self.stops:
            return piece, False
        self.held += piece
        found = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:  # the one that is whole first, as if the text had come a character at a time
            end, begin = min(found)
            shown, self.met, self.held = self.held[:begin], self.held[begin:end], ""
            return shown, True
        shown = self.held[: len(self.held) - self._begun()]
        self.held = self.held[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """What was held back, as no stop can come any more."""
        shown, self.held = self.held, ""
        return shown

    def _begun(self) -> int:
        """Characters at the end that may be the beginning of a stop."""
        longest = min(len(self.held), max((len(s) - 1 for s in self.stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self.held[-n:]) for s in self.stops)), 0)
