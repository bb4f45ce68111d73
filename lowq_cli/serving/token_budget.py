"""Measured times of passes, and how many prompt tokens a pass may take so that no stream stalls and no prompt starves.

Most passes with prompt tokens take at most SLACK times a wait for a token that all but SHORT of the waits exceed, or SLACK
steps if that is longer. So where prompts need longer passes than steps allow, more than half of the tokens come with a piece of
a prompt: each a little later, and none much later than the rest. While several prompts wait, passes are longer, up to SLACK
times a wait that all but CROWDED exceed. A few may take up to LONGEST_S: a burst of prompts is prefilled in large passes, most
of them without a step, so that a running sequence waits once for several. Where first tokens are preferred, all passes may take
that long; where smooth streams are, none is longer because several prompts wait. `benchmarks/serve_schedule.py` simulates this.
"""

from collections.abc import Sequence

# Both; or even streams, with no token much later than others; or the earliest possible first tokens.
PREFER = ("balanced", "smooth", "first-token")
# Seconds of a pass with prompt tokens, in steps or waits for a token. With 2.75 the p99 time between tokens is over 3 times the
# median; with 2.4 first tokens come later than vLLM's (benchmarks/notes/serving.md).
SLACK = 2.6
# Fraction of the waits that are shorter than `usual`. From 0.5 on, the median wait would be that for a plain step. Simulated
# documents for 16 users: at 0.45 the p99 is up to 7 times the median, at 0.35 first tokens come a tenth later.
SHORT = 0.4
CROWDED = 0.45  # the same for `crowded`; at 0.5 the p99 is up to 4 times the median where passes of SLACK steps nearly suffice
PACE = 0.02  # relative change of both in a pass: this fraction of it upwards, the rest downwards
READ = 4  # passes that the waiting tokens need where several prompts wait: for 16 users, one of 3,000 tokens needs about 5
HURRY = 12  # the same where `usual` and `crowded` begin to change faster than PACE
HURRIED = 4.0  # max. factor of PACE; with 1, 64 documents that come at once have their first tokens three times as late
ADVANCE = 0.6  # tokens of a sequence that may come after a longer wait: 1 in 200 tokens of an answer of 120
LONGEST_S = 0.1  # max. seconds of a pass: an 8B on an H200 prefills 4,096 tokens in 0.08 s
PAUSE_S = 0.4  # max. seconds that a sequence waits for a token while a burst of prompts is prefilled
# Max. seconds that a pass is expected to take while no sequence runs: a third of what means a hung device
# (`Limits.stuck_s`). A core takes 5.4 s for 512 tokens of a 1B (benchmarks/notes/cpu.md), so two take minutes for 4,096
# of an 8B.
ALONE_S = 20.0
FIRST = 256  # max. prompt tokens of such a pass while no pass with a prompt was timed
NEWEST = 0.2  # weight of the newest pass in moving averages
BUSY = 0.8  # a pass below this fraction of its expected time shows that the GPU was shared when the passes were measured


class TokenBudget:
    """Seconds of passes by (rows that step, all rows, whether some row has a LoRA adapter); the first two are equal in a pass
    without prompt tokens.

    Args:
        totals: sizes, in rows, of passes with prompt tokens, ascending. prefer: one of PREFER.
    Attributes:
        known: the fewest measured seconds of each size: those with little in the cache.
        extra: seconds that passes of any size now take in addition: attention over the running sequences.
        riding: seconds that passes with prompt tokens take in addition to both.
        length: seconds that a pass with prompt tokens may take now.
        usual, crowded: running quantiles of the seconds that a sequence waits for a token, which bound passes while one prompt
            waits and while several do; those of a step after the server was idle.
        late: tokens of the running sequences that came after one of the longer passes.
        unmet, busy: sizes measured at the start but not used since, and the factor to multiply their seconds by.
    """

    def __init__(self, totals: Sequence[int], prefer: str = PREFER[0]) -> None:
        self.totals, self.prefer = totals, prefer
        self.known: dict[tuple[int, int, bool], float] = {}
        self._nearest: dict[tuple[int, int, bool], tuple[int, int, bool]] = {}  # of the unknown ones, while none is added
        self._searched = 0  # number of known sizes then
        self.extra = self.riding = self.late = self._paused = 0.0
        self.length, self._passes, self._hurry = 0.0, 0.0, 1.0
        self._stepped, self._running = False, 0
        self.begin()

    def begin(self) -> None:
        """End the measurements at the start; passes from now on compute requests.

        With two other engines starting on the same GPU, all passes were measured 2.5 times too long: 16 users of an 8B got
        4,549 instead of 5,081 tokens/s, because passes were launched late and prompts prefilled in small pieces.
        """
        self.unmet, self.busy = set(self.known), 1.0
        self.usual = self.crowded = self._waited = 0.0

    def note(self, steps: int, rows: int, seconds: float, adapted: bool = False) -> None:
        """Record the seconds of a pass of `rows` rows, of which `steps` step."""
        if steps != rows:
            size = next((t for t in self.totals if t >= rows), self.totals[-1])
            rows, seconds = size, seconds * size / rows
        key, expected = (steps, rows, adapted), self._least(steps, rows, adapted)
        if seconds < BUSY * expected:
            self.busy *= seconds / expected
        least = self.known[key] = min(seconds, self._least(*key) if key in self.known else seconds)
        self.unmet.discard(key)
        more, mixed = seconds - least, 0 < steps < rows
        if mixed and self._stepped:  # the last pass was a plain step, so `extra` is current: the rest is due to the prompts
            self.riding = max(0.0, self.riding + NEWEST * (more - self.extra - self.riding))
        if mixed:  # also where no plain step comes between: what a former load's prompts took must not stay
            self.riding = min(self.riding, max(0.0, more))
        self._stepped = steps == rows
        self.extra = max(0.0, self.extra + NEWEST * (more - mixed * self.riding - self.extra))
        self._waited += seconds
        if steps:
            self._came(self.seconds(steps, steps, adapted))

    def drafted(self, seconds: float) -> None:
        """Record a pass in which running sequences checked drafts: their wait for a token ends with it."""
        self._stepped = False  # such a pass says nothing about `extra`
        self._waited += seconds
        self._came(seconds)

    def _came(self, step: float) -> None:
        """Move the quantiles at the end of a wait for a token. step: seconds that they begin with, 0 if unknown."""
        first = step or self._waited
        quantiles = (self.usual or first, SHORT), (self.crowded or first, CROWDED)
        self.usual, self.crowded = (
            wait * (1 + PACE * self._hurry * (q if self._waited > wait else q - 1)) for wait, q in quantiles
        )
        self._waited = 0.0

    def stepped(self, running: int) -> None:
        """Record that a pass steps `running` sequences; the share of `late` of sequences that have ended is dropped."""
        if self._paused and not running:
            return
        if running < self._running:
            self.late *= running / self._running
        self._running = running
        self._hurry, self._passes = min(HURRIED, max(1.0, self._passes / HURRY)), 0.0

    def seconds(self, steps: int, rows: int, adapted: bool = False) -> float:
        """Return the seconds of a pass; an unknown size is scaled from the nearest known one; `extra` if none is known."""
        least = self._least(steps, rows, adapted)
        return least + self.extra + (steps != rows) * self.riding if least else self.extra

    def _least(self, steps: int, rows: int, adapted: bool) -> float:
        """Return the seconds of a pass with little in the cache; 0 where no similar pass is known."""
        mixed, key = steps != rows, (steps, rows, adapted)
        if key not in self.known:
            found = self._near(key)
            if found is None:
                return 0.0
            key = found
        return self.known[key] * (self.busy if key in self.unmet else 1.0) * max(1.0, rows / key[1] if mixed else 1.0)

    def _near(self, key: tuple[int, int, bool]) -> tuple[int, int, bool] | None:
        """Return the known size nearest to an unknown one, found once: a search takes 10 us, and each plan asked for 70."""
        steps, rows, adapted = key
        if self._searched != len(self.known):
            self._nearest.clear()
            self._searched = len(self.known)
        if key not in self._nearest:
            alike = [known for known in self.known if (known[0] != known[1]) == (steps != rows)]
            if not alike:
                return None
            self._nearest[key] = min(alike, key=lambda k: (k[2] != adapted, abs(k[1] - rows), abs(k[0] - steps)))
        return self._nearest[key]

    def prompt_tokens(self, step: int, riding: int, waiting: int, running: int, texts: int, adapted: bool = False) -> int:
        """Return how many of `waiting` prompt tokens the next pass takes, with `riding` rows for `running` sequences that step.

        step: rows of a step once all waiting sequences run. texts: all open sequences. adapted: whether some row of the pass
        has an adapter. The pass takes as many tokens as fit into `length`, or into ALONE_S where no sequence runs. It takes at
        least those that the smallest pass has room for, and more where a long pass is due.
        """
        if not running:
            if not self._paused:  # the server was idle
                self.usual = self.crowded = self.seconds(step, step, adapted)
            timed = self._least(riding, self.totals[0], adapted) > 0
            return min(self._room(riding, ALONE_S, adapted) if timed else FIRST, self.totals[-1] - riding, waiting)
        room, longer = self._rooms(step, riding, waiting, adapted)
        if waiting > room and (self._paused or self.late + running <= ADVANCE * texts):
            self.late += running * (longer > room and not self._paused)
            room = longer
        self._paused = 0.0
        return min(room, waiting)

    def pauses(self, step: int, riding: int, waiting: int, running: int, texts: int, adapted: bool = False) -> bool:
        """Return whether the next pass prefills prompts only, while running sequences wait; arguments as in `prompt_tokens`.

        This is so where a longer pass is due and prompt tokens would be left over after it, for up to PAUSE_S: running
        sequences then wait once for several passes.
        """
        room, longer = self._rooms(step, riding, waiting, adapted)
        due = self._paused or self.late + running <= ADVANCE * texts
        seconds = self.seconds(0, next((t for t in self.totals if t >= waiting), self.totals[-1]), adapted)
        until = self._paused + seconds + self.seconds(step, step, adapted)
        if not due or waiting <= longer or longer <= room or until > PAUSE_S:
            return False
        self.late += running * (not self._paused)
        self._paused += seconds
        return True

    def _rooms(self, step: int, riding: int, waiting: int, adapted: bool) -> tuple[int, int]:
        """Return the prompt tokens that a usual pass, and a longer one, have room for in addition to `riding` rows."""
        least = SLACK * self.seconds(step, step, adapted)  # 0: no time of a step is known
        usual, crowded = SLACK * (self.usual or LONGEST_S), SLACK * (self.crowded or LONGEST_S)
        self._passes = waiting / self._room(riding, max(least, usual), adapted)
        grown = {
            "balanced": min(max(1.0, self._passes / READ) * usual, crowded),
            "smooth": usual,
            "first-token": LONGEST_S,
        }[self.prefer]
        self.length = max(least, min(grown, LONGEST_S)) if least else 0.0
        return self._room(riding, self.length, adapted), self._room(riding, max(self.length, LONGEST_S), adapted)

    def _room(self, riding: int, seconds: float, adapted: bool) -> int:
        """Return the prompt tokens of the largest pass that takes at most `seconds`; at least those of the smallest pass."""
        sizes = [t for t in self.totals if t > riding]
        return ([t for t in sizes if self.seconds(riding, t, adapted) <= seconds] or sizes[:1])[-1] - riding
