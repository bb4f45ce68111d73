"""Whether drafts pay, by the clock: time and tokens of steps with drafts, compared with plain steps of the same run.

A table of the cost of rows does not include the host's time: base in 4 bits ran at 34,000 tokens/s for 16 sequences without
drafts, and at 19,000 when the host guessed for each of them between two passes (H200, 2026-11-27).
"""

LOSS = 4.0  # max. time, in plain steps, that drafts may lose before they are turned off
# Max. time, in plain steps, that drafts have won and may lose again: texts copy in bursts, and between these the host still
# looks for drafts.
CREDIT = 64.0
MOST = 4 * LOSS  # max. counted loss of a single step, in plain steps: it may have waited for another process
SHARE = 0.01  # drafts are tried again when the time lost is at most this share of the plain steps since
LONGEST = 64  # max. factor of that wait, which doubles each time that drafts did not pay
CHECK, PLAIN = 512, 16  # steps after which plain steps are timed again while drafts pay, and the number of these
SETTLE = 2  # plain steps after a change that are not timed: the first of them may have waited for one of the other kind
NEWEST = 1 / 16  # weight of the newest step in the mean time of plain steps


class Balance:
    """The time that drafts have won or lost.

    Args:
        first: plain steps before drafts are tried for the first time. plain_s: seconds of a plain step if drafts may be tried
            at once, as they pay where they bring less; else 0.0. sooner: the first factor of the wait, below 1 where it may be
            chance that drafts do not pay.
    Attributes:
        allowed: whether the next step may have drafts. plain_s: mean seconds of plain steps.
    """

    def __init__(self, first: int, plain_s: float = 0.0, sooner: float = 1.0) -> None:
        self.allowed, self.plain_s, self._sooner = plain_s > 0, plain_s, sooner
        self._won = self._lost = self._wait_s = 0.0
        self._wait, self._steps, self._factor = first, 0, sooner

    @property
    def waits(self) -> bool:
        """Whether drafts did not pay, and it is not yet time to try them again."""
        return not self.allowed and self._wait_s > 0

    def note(self, tokens: float, seconds: float, once: bool = False) -> None:
        """Record a step. tokens: its new tokens per sequence. once: whether it did work that later steps do not repeat, such as
        to read a prompt for drafts; such time lengthens the wait after drafts did not pay, and does not turn them off.

        While drafts are allowed, steps without any count too: the host looked for drafts before them.
        """
        self._steps += 1
        if not self.allowed:
            self._time(seconds)
        else:
            self._count(tokens * self.plain_s - seconds, once)
        if self.allowed and self._steps >= CHECK:
            self._change(False, PLAIN)
        elif not self.allowed and self._steps >= self._wait and self._wait_s <= 0:
            self._change(True)

    def _time(self, seconds: float) -> None:
        self._wait_s -= seconds
        if self._steps > SETTLE:
            self.plain_s += (NEWEST if self.plain_s else 1.0) * (seconds - self.plain_s)

    def _count(self, won: float, once: bool) -> None:
        room = LOSS * self.plain_s
        self._lost += min(max(0.0, -won), MOST * self.plain_s)
        if once:
            return
        self._won = min(self._won + max(won, -room), CREDIT * self.plain_s)  # one late step is not enough to turn drafts off
        if self._won >= room:
            self._factor, self._lost = self._sooner, 0.0
        elif self._won < -room:
            self.give_up()

    def give_up(self) -> None:
        """Turn drafts off for a time: they do not pay, or there are none."""
        self._wait_s = self._lost / SHARE * self._factor
        self._factor = min(2 * self._factor, LONGEST)
        self._won = self._lost = 0.0
        self._change(False)

    def _change(self, allowed: bool, wait: int = 0) -> None:
        self.allowed, self._steps, self._wait = allowed, 0, wait
