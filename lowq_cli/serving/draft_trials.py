"""Whether the server's passes take drafts at all: a balance of the time for each number of sequences."""

from collections.abc import Callable

from lowq_cli.engine.drafts.balance import Balance

FIRST = 128  # plain passes of a size before drafts are tried with it, for MANY sequences and more
LEAST = 16  # the same for one: enough to time them
# Sequences whose passes are evidence. With one, that drafts lost time says little: one passage of its text was hard to guess.
# An EAGLE-3 head of 1.25 to 1.39 times the speed of one user was off for 680 of the first 816 tokens (H200). Simulated with
# that run's passes, the first 300 tokens have 1.16 to 1.32 times the speed instead of 1.05 to 1.12, the first 1,000 1.18 to
# 1.35 instead of 1.10 to 1.26, and a head that always loses costs 3%, then 2% instead of 1%; from 3,000 on 1% as before.
MANY = 8


class Trials:
    """A balance for each size of plain passes, since what drafts cost and bring depends on the number of sequences.

    Args:
        seconds: size -> seconds of a plain pass, 0.0 where none is known.
    """

    def __init__(self, seconds: Callable[[int], float] = lambda size: 0.0) -> None:
        self._seconds = seconds
        self._each: dict[int, Balance] = {}
        self._last: tuple[int, float] | None = None  # size and end of the last pass, if the next follows at once
        self._open_s = 0.0  # seconds of turns in which no tokens came

    def allows(self, size: int) -> bool:
        """Return whether the next pass may have drafts."""
        return self._of(size).allowed

    def waits(self, size: int) -> bool:
        """Return whether drafts did not pay with this size, and it is not yet time to try them again."""
        return self._of(size).waits

    def plain_s(self, size: int) -> float:
        """Return the mean seconds from one plain pass to the next, with the host's time; 0.0 where none was timed."""
        return self._of(size).plain_s

    def passed(self, size: int, tokens: int, sequences: int, now: float, once: bool = False, away_s: float = 0.0) -> None:
        """Record the end of a turn at the time `now`: the tokens that came in passes without prompt tokens, and the sequences
        in such a pass. once: as `Balance.note` means it. away_s: seconds of passes with prompt tokens that were read in it.

        With drafts a pass with prompt tokens cannot be launched ahead, so the device is idle before it: this counts.
        """
        if self._last is not None and self._last[0] == size:
            self._open_s += now - self._last[1] - away_s
            if tokens:
                self._of(size).note(tokens / sequences, max(0.0, self._open_s), once)
                self._open_s = 0.0
        else:
            self._open_s = 0.0
        self._last = size, now

    def give_up(self, size: int) -> None:
        """Turn drafts off for a time with this size: there are none."""
        self._of(size).give_up()

    def interrupted(self) -> None:
        """Record that the next pass does not follow the last one at once: nothing is asked."""
        self._last = None

    def _of(self, size: int) -> Balance:
        if size not in self._each:
            more = min((n for n in self._each if n > size), default=None)
            pays = more is not None and self._each[more].allowed
            share = min(1.0, size / MANY)
            first = max(LEAST, round(FIRST * share))
            self._each[size] = Balance(first, self._seconds(size) if pays else 0.0, share)
        return self._each[size]
