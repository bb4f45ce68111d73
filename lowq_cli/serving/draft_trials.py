"""Whether the server's passes take drafts at all: measured by what passes with drafts and without them yield by the clock.

A pass with drafts costs more than its rows: the host guesses for every sequence, and the device waits for the guesses. With a
small model this exceeds the pass itself: 16 sequences of base in 4 bits made 31,300 tokens/s without drafts, and 11,000 with
n-gram drafts on copying loads (H200, 2026-11-26). So both ways are tried in turn, and the faster one is used.
"""

WINDOW = 32  # passes over which a way is measured
SETTLE = 2  # passes after a change that are not measured: the first of them waits for a pass of the other way
STAY = 8  # windows with drafts after which plain passes are measured again: 1 pass in 9 goes without drafts where they pay
LEAST_WAIT, MOST_WAIT = 4, 128  # windows without drafts between two trials; doubled after each trial that fails
GAIN = 1.03  # drafts are used while they yield this many times the tokens per second of plain passes; less is noise


class Trial:
    """The two ways with about the same number of sequences.

    Attributes:
        drafts: whether the next pass may have drafts.
    """

    def __init__(self) -> None:
        self.drafts, self._failed = True, 0
        self._rates: dict[bool, float] = {}  # drafts -> tokens per second of a sequence, in the way's last window
        self._windows = 0  # windows since the last change
        self._begin()

    def note(self, tokens: int, texts: int, seconds: float) -> None:
        """Record a pass in which `texts` sequences stepped: the tokens that came, and the seconds since the pass before."""
        self._passes += 1
        if self._passes > SETTLE:
            self._tokens, self._seconds = self._tokens + tokens / texts, self._seconds + seconds
        if self._passes == SETTLE + WINDOW:
            self._rates[self.drafts] = self._tokens / max(self._seconds, 1e-9)
            self._windows += 1
            self._begin()
            self._decide()

    def _begin(self) -> None:
        self._passes, self._tokens, self._seconds = 0, 0.0, 0.0

    def _decide(self) -> None:
        """Choose the way of the next window, at the end of one."""
        if len(self._rates) < 2:
            self._change(not self.drafts)
            return
        pays = self._rates[True] >= GAIN * self._rates[False]
        if self.drafts:
            if not pays:
                self._failed += 1
            if not pays or self._windows >= STAY:
                self._change(False)
        elif self._windows >= (1 if pays else self._wait):
            self._change(True)
        if pays:
            self._failed = 0

    @property
    def _wait(self) -> int:
        return min(LEAST_WAIT << min(self._failed, 16), MOST_WAIT)

    def _change(self, drafts: bool) -> None:
        self.drafts, self._windows = drafts, 0


class Trials:
    """A Trial for each size of plain passes, since what drafts cost and bring depends on the number of sequences."""

    def __init__(self) -> None:
        self._each: dict[int, Trial] = {}
        self._last: tuple[int, float] | None = None  # the size and the end of the last pass, if the next one follows at once

    def of(self, size: int) -> Trial:
        """Return the trial of a size."""
        return self._each.setdefault(size, Trial())

    def passed(self, size: int, tokens: int, texts: int, now: float) -> None:
        """Record the end of a pass without prompt tokens, at the time `now`."""
        if self._last is not None and self._last[0] == size:
            self.of(size).note(tokens, texts, now - self._last[1])
        self._last = size, now

    def interrupted(self) -> None:
        """Record that the next pass does not follow the last one at once: prompts are read, or nothing is asked."""
        self._last = None
