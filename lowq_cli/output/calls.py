"""What a syntax of calls offers its readers, and what the syntaxes with one pair of tags share."""

from dataclasses import dataclass
from typing import Protocol

from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Source, Wait


class Calls(Protocol):
    """A syntax of calls."""

    @property
    def form(self) -> tuple[str, ...]:
        """The pieces of a call: literal texts and the placeholders NAME and ARGUMENTS, or OBJECT for both. () if there is no
        grammar for the syntax: forced calls are then bare JSON, which is read with every syntax."""
        return ()

    @property
    def tags(self) -> tuple[str, ...]:
        """The marks that may be special tokens, which decoding would leave out."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks that begin a call."""
        ...

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the next calls, and the calls; takes at least one character if there is one."""
        ...


@dataclass(frozen=True)
class Enclosed(Calls):
    """A syntax whose calls stand between two tags; either tag may be ""."""

    open: str = ""
    close: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """As `Calls.tags`."""
        return tuple(filter(None, (self.open, self.close)))

    @property
    def openers(self) -> tuple[str, ...]:
        """As `Calls.openers`."""
        return tuple(filter(None, (self.open,)))
