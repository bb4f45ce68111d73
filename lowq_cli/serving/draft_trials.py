"""Whether the server's passes take drafts at all: a balance of the time for each number of sequences."""

from lowq_cli.engine.drafts.balance import Balance

FIRST = 128  # plain passes of a size before drafts are tried with it


class Trials:
    """A balance for each size of plain passes, since what drafts cost and bring depends on the number of sequences."""

    def __init__(self) -> None:
        self._each: dict[int, Balance] = {}
        self._last: tuple[int, float] | None = None  # size and end of the last pass, if the next follows at once

    def allows(self, size: int) -> bool:
        """Return whether the next pass may have drafts."""
        return self._of(size).allowed

    def plain_s(self, size: int) -> float:
        """Return the mean seconds from one plain pass to the next, with the host's time; 0.0 where none was timed."""
        return self._of(size).plain_s

    def passed(self, size: int, tokens: int, texts: int, now: float, once: bool = False) -> None:
        """Record the end of a pass without prompt tokens at the time `now`: the tokens that came, and the sequences in it.
        once: as `Balance.note` means it."""
        if self._last is not None and self._last[0] == size:
            self._of(size).note(tokens / texts, now - self._last[1], once)
        self._last = size, now

    def interrupted(self) -> None:
        """Record that the next pass does not follow the last one at once: prompts are read, or nothing is asked."""
        self._last = None

    def _of(self, size: int) -> Balance:
        return self._each.setdefault(size, Balance(FIRST))
