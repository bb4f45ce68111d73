"""A buffer for text that arrives in pieces, with readers written as generators.

A reader yields when it needs text that has not arrived yet. It decides only what is certain, so its output does not depend on
how the text was cut into pieces.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Say = Callable[[str], object]
NAME, ARGUMENTS, OBJECT = "NAME", "ARGUMENTS", "OBJECT"  # placeholders in `Calls.form`
LONGEST = 256  # max. characters of a function's or parameter's name; longer text is not held back as a possible name


def ignore(_: str) -> None:
    """Drop the text."""


class Source:
    """The text that has arrived and is not consumed yet.

    Attributes:
        held: the unconsumed text. ended: whether no more text follows. cut: whether a token limit ended it, not the model.
        taken: the text consumed since `mark`.
    """

    def __init__(self) -> None:
        self.held, self.taken, self.ended, self.cut = "", "", False, False
        self._marked = False

    @property
    def over(self) -> bool:
        """Whether all text is consumed and no more follows."""
        return self.ended and not self.held

    def take(self, n: int) -> str:
        """Consume and return the next n characters."""
        text, self.held = self.held[:n], self.held[n:]
        if self._marked:
            self.taken += text
        return text

    def mark(self) -> None:
        """Record the text consumed from here on, for `back`."""
        self.taken, self._marked = "", True

    def sure(self) -> None:
        """Remove the mark."""
        self.taken, self._marked = "", False

    def back(self, before: str = "") -> None:
        """Return to the mark, and put `before`, the text consumed just before it, back as well."""
        self.held = before + self.taken + self.held
        self.sure()

    def until(self, tags: tuple[str, ...], say: Say) -> Wait[str]:
        """Pass the text before the first tag to `say`; consume and return the tag, the longest at that place; "" at the end."""
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
        """Pass the text before the first call to `say`; consume the tags of section and call; return the first tag, or ""."""
        tag = yield from self.until(openers, say)
        if tag:
            self.mark()
        if tag and tag == section:
            yield from self.blanks()
            yield from self.takes(call)
        return tag

    def _first(self, tags: tuple[str, ...]) -> tuple[int, str]:
        """(characters before the first tag, the tag); the tag is "" if there is none, or if one may begin at the text's end."""
        text, n = self.held, len(self.held)
        best, _, tag = min(((at, -len(t), t) for t in tags if (at := text.find(t)) >= 0), default=(n, 0, ""))
        if not self.ended:
            first = {t[0] for t in tags}
            for begun in range(max(0, n - max(map(len, tags), default=1) + 1), min(best + 1, n)):
                if text[begun] in first and any(len(t) > n - begun and t.startswith(text[begun:]) for t in tags):
                    return begun, ""
        return best, tag

    def takes(self, *options: str) -> Wait[str]:
        """Consume and return the longest option that the text begins with; "" for none."""
        while True:
            longest = max((o for o in options if self.held.startswith(o)), key=len, default="")
            if self.ended or not any(len(o) > len(longest) and o.startswith(self.held) for o in options):
                return self.take(len(longest))
            yield

    def blanks(self) -> Wait[str]:
        """Consume and return whitespace."""
        text = ""
        while True:
            text += self.take(len(self.held) - len(self.held.lstrip()))
            if self.held or self.ended:
                return text
            yield

    def word(self, *ends: str) -> Wait[str | None]:
        """Consume the text up to one of the ends, and the end; return the text; None if it exceeds LONGEST or has no end."""
        while True:
            at, end = self._first(ends)
            if at > LONGEST or (self.ended and not end):
                return None
            if end:
                piece = self.take(at)
                self.take(len(end))
                return piece
            yield
