"""The text of one answer in, its parts out."""

from lowq_cli.output import bare_json
from lowq_cli.output.dialects import Ways
from lowq_cli.output.parts import Offered, Part, Parts
from lowq_cli.output.source import Source, Wait


class Reader:
    """Reads one answer.

    Args:
        ways: how the model writes. offered: what it may call. inside: whether the prompt ended in the midst of thoughts.
    """

    def __init__(self, ways: Ways, offered: Offered, inside: bool = False) -> None:
        self.ways, self.offered = ways, offered
        self.source, self.out = Source(), Parts(offered)
        self.tags = ways.tags(bool(offered.functions))
        self._run = self._read(inside)
        next(self._run, None)

    @property
    def thinks(self) -> bool:
        """Whether the model has a place for thoughts."""
        return self.ways.thinks

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self.out.thinking

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self.out.calls

    def push(self, text: str, ended: bool = False, cut: bool = False) -> list[Part]:
        """The parts that are certain now. ended: whether that was all; cut: by a limit, in the midst of a call perhaps."""
        self.source.held += text
        self.source.ended, self.source.cut = ended, cut
        if ended and cut and self.offered.forced:
            self.out.mute = True  # what is left began as a call
        next(self._run, None)
        if self.out.mute and not self.out.calls and self.offered.only:
            self.out.call(self.offered.only)
        return self.out.take()

    def _read(self, inside: bool) -> Wait[None]:
        source, out, ways = self.source, self.out, self.ways
        offers = bool(self.offered.functions)
        calls = ways.calls if offers or ways.channels else None
        begun = False
        while not source.over:
            if ways.thoughts is not None:
                yield from ways.thoughts.read(source, out, inside, calls.openers if calls else ())
            inside = False
            if offers and not begun and not ways.channels:
                yield from bare_json.read(source, out)
            begun = True
            if calls is not None:
                yield from calls.read(source, out)
            else:
                yield from source.until((), out.text)
            if not source.held and not source.ended:
                yield
