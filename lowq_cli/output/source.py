"""Text that comes in pieces, for readers which are written as if all of it were there.

A reader is a generator: it yields where it needs text that has not come yet. Nothing is decided before it is certain, so what
comes out does not depend on where the text was cut into pieces.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Say = Callable[[str], object]
NAME, ARGUMENTS, OBJECT = "NAME", "ARGUMENTS", "OBJECT"  # places in the form of a call
LONGEST = 256  # characters of a name in a call: what is longer is none, and is not kept back as one


def ignore(_: str) -> None:
    """Say nothing."""


class Source:
    """The text that has come and is not taken yet.

    Attributes:
        ended: whether no more will come. cut: whether that was by a limit, not by the model.
        taken: what was taken since `mark`.
    """

    def __init__(self) -> None:
        self.held, self.taken, self.ended, self.cut = "", "", False, False
        self._marked = False

    @property
    def over(self) -> bool:
        """Whether all has been taken and no more comes."""
        return self.ended and not self.held

    def take(self, n: int) -> str:
        """The next n characters."""
        found, self.held = self.held[:n], self.held[n:]
        if self._marked:
            self.taken += found
        return found

    def mark(self) -> None:
        """Keep what is taken from here on, for `back`."""
        self.taken, self._marked = "", True

    def sure(self) -> None:
        """What was taken since the mark will not be asked for again."""
        self.taken, self._marked = "", False

    def back(self, before: str = "") -> None:
        """To the mark, and to `before`, which was taken just before it."""
        self.held = before + self.taken + self.held
        self.sure()

    def until(self, tags: tuple[str, ...], say: Say) -> Wait[str]:
        """Say what comes before the first of the tags, and take that tag: the longest, where two begin alike. "" at the end."""
        while True:
            at, tag = self._first(tags)
            if at:
                say(self.take(at))
            if tag:
                return self.take(len(tag))
            if self.ended:
                return ""
            yield

    def opening(self, openers: tuple[str, ...], section: str, call: str, say: Say) -> Wait[str]:
        """Say what comes before the first call, and take its tag, behind that of a section where there is one: "" for none."""
        tag = yield from self.until(openers, say)
        if tag:
            self.mark()
        if tag and tag == section:
            yield from self.blanks()
            yield from self.takes(call)
        return tag

    def _first(self, tags: tuple[str, ...]) -> tuple[int, str]:
        """(characters before the first tag, the tag); with "" where it may be beginning at the end of what has come."""
        held, n = self.held, len(self.held)
        best, _, tag = min(((at, -len(t), t) for t in tags if (at := held.find(t)) >= 0), default=(n, 0, ""))
        if not self.ended:
            first = {t[0] for t in tags}
            for begun in range(max(0, n - max(map(len, tags), default=1) + 1), min(best + 1, n)):
                if held[begun] in first and any(len(t) > n - begun and t.startswith(held[begun:]) for t in tags):
                    return begun, ""
        return best, tag

    def takes(self, *options: str) -> Wait[str]:
        """Take the longest of the options that the text goes on with; "" for none."""
        while True:
            found = max((o for o in options if self.held.startswith(o)), key=len, default="")
            if self.ended or not any(len(o) > len(found) and o.startswith(self.held) for o in options):
                return self.take(len(found))
            yield

    def blanks(self) -> Wait[str]:
        """Take blanks."""
        found = ""
        while True:
            found += self.take(len(self.held) - len(self.held.lstrip()))
            if self.held or self.ended:
                return found
            yield

    def word(self, *ends: str) -> Wait[str | None]:
        """Take what comes before one of the ends, and the end; None where that is longer than a name, or does not come."""
        while True:
            at, end = self._first(ends)
            if at > LONGEST or (self.ended and not end):
                return None
            if end:
                found = self.take(at)
                self.take(len(end))
                return found
            yield
