"""Turns the text of one answer into parts."""

from lowq_cli.output import bare_json
from lowq_cli.output.parts import Offered, Part, Parts
from lowq_cli.output.source import Source, Wait
from lowq_cli.output.syntaxes import Syntax


class Reader:
    """The reader of one answer.

    Args:
        syntax: the model's syntax. offered: the functions it may call. inside: whether the prompt ended inside thoughts.
    """

    def __init__(self, syntax: Syntax, offered: Offered, inside: bool = False) -> None:
        self.syntax, self.offered = syntax, offered
        self.source, self.out = Source(), Parts(offered)
        self.tags = syntax.tags(bool(offered.functions))
        self.may_think = True  # whether thoughts may still come, or go on
        self._run = self._read(inside)
        next(self._run, None)

    @property
    def thinks(self) -> bool:
        """Whether the model has a separate section for thoughts."""
        return self.syntax.thinks

    @property
    def thinking(self) -> bool:
        """Whether the text read so far ends inside thoughts."""
        return self.out.thinking

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self.out.calls

    def push(self, text: str, ended: bool = False, cut: bool = False) -> list[Part]:
        """The new parts that are certain. ended: whether this is the last text. cut: whether a token limit ended it."""
        self.source.held += text
        self.source.ended, self.source.cut = ended, cut
        if ended and cut and self.offered.forced:
            self.out.mute = True  # the rest is an incomplete call
        next(self._run, None)
        if ended:
            self.out.end()
        if self.out.mute and not self.out.calls and self.offered.only:
            self.out.call(self.offered.only)
        return self.out.take()

    def _read(self, inside: bool) -> Wait[None]:
        source, out, syntax = self.source, self.out, self.syntax
        offers = bool(self.offered.functions)
        calls = syntax.calls if offers or syntax.channels else None
        begun = False
        while not source.over:
            if syntax.thoughts is not None:
                yield from syntax.thoughts.read(source, out, inside, calls.openers if calls else ())
            inside = False
            if offers and not begun and not syntax.channels:
                yield from bare_json.read(source, out)
            begun = True
            if calls is not None:
                yield from calls.read(source, out)
            else:
                self.may_think = False
                yield from source.until((), out.text)
            if not source.held and not source.ended:
                yield
