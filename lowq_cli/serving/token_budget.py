"""How long passes take, as measured, and how many prompt tokens one may carry so that no stream stalls and no prompt starves.

Most passes with prompt tokens take at most `slack` times a step. That is SLACK where prompts are read as fast as they come.
While some are left over after each pass it grows, as far as SPREAD times what texts usually wait for a token: then every token
comes a little later, none much later than the others. A few passes may take longer, up to LONGEST_S: a burst of prompts is read
in large ones, most of them without a step, so that a text under way waits once for several. Where first tokens are preferred,
all passes may. `benchmarks/serve_schedule.py` tries such numbers on measured times.
"""

from collections.abc import Sequence

PREFER = ("smooth", "first-token")  # streams in which no token is much later than others; prompts as soon as can be
# Times a step: what a pass with prompt tokens may take at least. By 2.75 p99 between tokens is over 3 times the median, by 2.4
# first tokens come later than vLLM's (benchmarks/notes/serving.md).
SLACK = 2.6
SPREAD = 2.6  # times the usual wait for a token: what a pass may take at most. By 2.8 p99 is over 3 times the median
PACE = 0.02  # by how much of themselves `slack` grows and `usual` moves in a pass at most; `slack` shrinks by half of it
ADVANCE = 0.6  # tokens of a text that may come after a longer wait: 1 in 200 of an answer of 120
LONGEST_S = 0.1  # of a pass: an 8B on an H200 reads 4,096 tokens in 0.08
PAUSE_S = 0.4  # of a text between two tokens, while a burst is read without it
NEWEST = 0.2  # weight of the newest pass in what is learnt
BUSY = 0.8  # of what a pass was expected to take: one that takes less says that the GPU was not alone when all were measured


class TokenBudget:
    """Seconds of passes by (rows that step, all rows): equal where no prompt tokens ride along.

    Args:
        totals: rows of the passes that carry prompt tokens, ascending. prefer: of PREFER.
    Attributes:
        known: the fewest seconds that were seen of each: with little in the cache.
        extra: what passes take beyond that now, whatever their size: attention over the texts that run.
        riding: what those with prompt tokens take beyond both.
        slack: times a step that a pass with prompt tokens may take now.
        usual: seconds that half of all tokens are waited for at most, lately.
        late: tokens of those that run which came after a longer wait than that.
        unmet, busy: sizes that no text's pass has had yet, and what to multiply their seconds by.
    """

    def __init__(self, totals: Sequence[int], prefer: str = PREFER[0]) -> None:
        self.totals, self.prefer = totals, prefer
        self.known: dict[tuple[int, int], float] = {}
        self.extra = self.riding = self.late = self._paused = 0.0
        self.slack, self._share = SLACK, 1.0
        self._stepped, self._left, self._running, self._texts = False, False, 0, 0
        self.begin()

    def begin(self) -> None:
        """What is known was measured; passes from now on are of texts.

        Beside two engines that started on the same GPU all seemed to take 2.5 times as long: 16 users of an 8B got 4,549 of
        5,081 tokens/s, as passes were launched late and prompts read in small pieces.
        """
        self.unmet, self.busy = set(self.known), 1.0
        self.usual = self._waited = 0.0

    def note(self, steps: int, rows: int, seconds: float) -> None:
        """A pass of so many rows, of which so many step, took so long."""
        if steps != rows:
            size = next((t for t in self.totals if t >= rows), self.totals[-1])
            rows, seconds = size, seconds * size / rows
        expected = self._least(steps, rows)
        if seconds < BUSY * expected:
            self.busy *= seconds / expected
        least = self.known[steps, rows] = min(seconds, self._least(steps, rows) if (steps, rows) in self.known else seconds)
        self.unmet.discard((steps, rows))
        more, mixed = seconds - least, 0 < steps < rows
        if mixed and self._stepped:  # `extra` is of this moment: what is left is the prompts'
            self.riding = max(0.0, self.riding + NEWEST * (more - self.extra - self.riding))
        self._stepped = steps == rows
        self.extra = max(0.0, self.extra + NEWEST * (more - mixed * self.riding - self.extra))
        self._waited += seconds
        if steps:
            self.usual = self.usual or self._waited
            self.usual *= 1 + PACE * self._share * (1 if self._waited > self.usual else -1)
            self._waited = 0.0

    def stepped(self, running: int) -> None:
        """A pass steps so many texts; with those that ended goes their part of `late`."""
        if self._paused and not running:
            return
        if running < self._running:
            self.late *= running / self._running
        self._running = running
        if running:
            self._share = (running / max(running, self._texts)) ** 2  # in a burst few run: it is not how things will go on
            self.slack = max(SLACK, self.slack * (1 + PACE * self._share * (1 if self._left else -0.5)))
        self._texts, self._left = 0, False

    def seconds(self, steps: int, rows: int) -> float:
        """What a pass takes; one of which nothing is known as the nearest that is known, in proportion; `extra` without any."""
        least = self._least(steps, rows)
        return least + self.extra + (steps != rows) * self.riding if least else self.extra

    def _least(self, steps: int, rows: int) -> float:
        """What it takes with little in the cache; 0 where none like it is known."""
        mixed, key = steps != rows, (steps, rows)
        if key not in self.known:
            alike = [known for known in self.known if (known[0] != known[1]) == mixed]
            if not alike:
                return 0.0
            key = min(alike, key=lambda known: (abs(known[1] - rows), abs(known[0] - steps)))
        return self.known[key] * (self.busy if key in self.unmet else 1.0) * max(1.0, rows / key[1] if mixed else 1.0)

    def prompt_tokens(self, step: int, riding: int, waiting: int, running: int, texts: int) -> int:
        """Prompt tokens of the next pass, of `waiting` ones, which carries `riding` rows that step, `running` texts in them.

        step: rows of a step once all who wait are running. texts: all that are under way. As many as take `slack` times such a
        step, at least what the smallest pass has room for; all of them where no text runs, and where a long pass is due.
        """
        if not running:
            return min(self.totals[-1] - riding, waiting)
        room, longer = self._rooms(step, riding)
        self._texts, self._left = texts, waiting > room
        if waiting > room and (self._paused or self.late + running <= ADVANCE * texts):
            self.late += running * (longer > room and not self._paused)
            room = longer
        self._paused = 0.0
        return min(room, waiting)

    def pauses(self, step: int, riding: int, waiting: int, running: int, texts: int) -> bool:
        """Whether the texts that run wait in the next pass, which then reads prompts alone; arguments as of `prompt_tokens`.

        Where a longer pass is due and prompts are left over after it, for up to PAUSE_S: they wait once for several passes.
        """
        room, longer = self._rooms(step, riding)
        due = self._paused or self.late + running <= ADVANCE * texts
        seconds = self.seconds(0, next((t for t in self.totals if t >= waiting), self.totals[-1]))
        if not due or waiting <= longer or longer <= room or self._paused + seconds + self.seconds(step, step) > PAUSE_S:
            return False
        self.late += running * (not self._paused)
        self._paused += seconds
        return True

    def _rooms(self, step: int, riding: int) -> tuple[int, int]:
        """Prompt tokens that a pass has room for beside `riding` rows, and a longer one."""
        least = self.seconds(step, step)
        if not least:
            self.slack = SLACK
        elif self.prefer == "first-token":
            self.slack = max(SLACK, LONGEST_S / least)
        else:
            self.slack = max(SLACK, min(self.slack, LONGEST_S / least, SPREAD * (self.usual or LONGEST_S) / least))
        return self._room(riding, self.slack * least), self._room(riding, max(self.slack * least, LONGEST_S))

    def _room(self, riding: int, seconds: float) -> int:
        """Prompt tokens of the largest pass that takes no longer; at least of the smallest."""
        sizes = [t for t in self.totals if t > riding]
        return ([t for t in sizes if self.seconds(riding, t) <= seconds] or sizes[:1])[-1] - riding
