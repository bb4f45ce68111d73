"""Texts that end a generation: text after one is dropped, and text that may begin one is held back."""

from collections.abc import Sequence

from lowq_packers.errors import UsageError


def check(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop texts as a tuple. Raises UsageError for an empty one, which would end every sequence at once."""
    if "" in stops:
        raise UsageError("a text to stop at is empty; leave --stop out, or name some text")
    return tuple(stops)


class Stopper:
    """Searches a sequence's output for stop texts. `push` takes a piece; it returns text to show and whether one occurred."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = self.met = ""  # met: the stop text that ended the sequence

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that can be shown now, without a stop text; and whether a stop text has occurred."""
        if not self.stops:
            return piece, False
        self.held += piece
        stops_here = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if stops_here:  # the stop text that is complete first, as if the text came character by character
            end, begin = min(stops_here)
            shown, self.met, self.held = self.held[:begin], self.held[begin:end], ""
            return shown, True
        shown = self.held[: len(self.held) - self._begun()]
        self.held = self.held[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """The text that was held back, at the end of the sequence."""
        shown, self.held = self.held, ""
        return shown

    def _begun(self) -> int:
        """The number of characters at the end that may begin a stop text."""
        longest = min(len(self.held), max((len(s) - 1 for s in self.stops), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self.held[-n:]) for s in self.stops)), 0)
