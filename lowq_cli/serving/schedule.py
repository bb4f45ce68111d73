"""Who computes what next: the host's decisions, without a tensor in them.

A text waits, is read (its prompt in pieces, over several passes), runs (a token a pass) and ends. A pass takes one step of all
that run and as many prompt tokens as its caller allows. The host decides on a pass before it has seen the tokens of the last
one: a text that had ended by then has one step too many, whose result nobody reads. Where no block is free, the youngest text
gives back its own and waits again, its tokens so far now part of its prompt; with `fixed` it begins again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowq_cli.serving.pool import START, Pool
from lowq_cli.serving.request import Request
from lowq_cli.serving.turns import Turns

READERS = 16  # prompts that are read at once
GIVES_WAY = 8  # steps from one look at whether a text should give its place to another to the next


class Text:
    """One request on its way.

    Attributes:
        tokens: the prompt and what was drawn so far. prompt: how many of them were asked with.
        computed: slots whose keys and values are in the cache, or on their way there.
        ahead: tokens that are being drawn, which the host has not seen.
        blocks: of the cache, in order; the first `named` of them have a name, the last such is called `name`.
        row: where its state stands on the device; while it is read, the row of its table alone. -1: it waits. sent: how many of
            its blocks stand in the table there.
        cached: tokens that were found in the cache when it was admitted first.
        failed: why it cannot go on, where it alone cannot.
        known: tokens that were told before it was put back to its prompt.
        since, waited, first: its place in time, as `turns` has it.
        turn: prompt tokens that the engine had read when this text was admitted, and its own: the least is read next.
    """

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.tokens, self.prompt = list(request.prompt), len(request.prompt)
        self.blocks: list[int] = []
        self.computed = self.ahead = self.named = self.sent = self.turn = 0
        self.name, self.row, self.cached = START, -1, -1
        self.told = self.done = False
        self.failed: Exception | None = None
        self.since, self.waited, self.first = 0, 0, False
        self.known: list[int] = []

    @property
    def repeated(self) -> int | None:
        """The token that comes next, where it was told before."""
        made = len(self.tokens) - self.prompt
        return self.known[made] if made < len(self.known) else None

    def repeat(self) -> None:
        """Back to the prompt: what was drawn is drawn again, by the same kernels."""
        drawn = self.tokens[self.prompt :]
        self.known = max(self.known, drawn, key=len)
        del self.tokens[self.prompt :]

    @property
    def room(self) -> int:
        """Tokens that it may still be given, those on their way not counted."""
        return self.request.max_tokens - (len(self.tokens) - self.prompt) - self.ahead


@dataclass
class PassPlan:
    """A pass: texts that step, pieces of prompts (text, row of its table, first token, end), texts that are through with them.

    Before it, in this order: moves (from, to), one after the other; freed, rows that are nobody's now; placed, texts that were
    moved, and their next slots; tables (row, place in it, blocks). Those that are through have rows that steps of this pass may
    still run in: their tables come after it.
    """

    steps: list[Text] = field(default_factory=list)
    pieces: list[tuple[Text, int, int, int]] = field(default_factory=list)
    finishing: list[Text] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    placed: list[tuple[Text, int]] = field(default_factory=list)
    tables: list[tuple[int, int, list[int]]] = field(default_factory=list)


class Schedule:
    """The texts of an engine and what they hold.

    Args:
        pool: the cache's book.
        rows: texts that run at once, in rows 0 .. rows - 1; readers have the READERS rows after those.
        bucket: rows in use -> rows that a pass computes; texts move together where that makes it smaller.
        fixed: prompts are read in passes of their own, and nothing is shared: what a text computes is its own.
    """

    def __init__(self, pool: Pool, rows: int, bucket: Callable[[int], int], fixed: bool = False) -> None:
        self.pool, self.bucket, self.fixed = pool, bucket, fixed
        self._stepped = True
        self.waiting: deque[Text] = deque()
        self.reading: list[Text] = []
        self.running: list[Text | None] = [None] * rows
        self._readers = list(range(rows + READERS - 1, rows - 1, -1))
        self._freed: list[int] = []
        self._moves: list[tuple[int, int, Text]] = []
        self.preemptions = self.prefix_hits = self.read = self.step = 0

    @property
    def active(self) -> list[Text]:
        """All that are read or run."""
        return [*self.reading, *(t for t in self.running if t is not None)]

    @property
    def high(self) -> int:
        """One more than the last row that runs."""
        return max((row + 1 for row, t in enumerate(self.running) if t is not None), default=0)

    def add(self, texts: Sequence[Text]) -> None:
        """More texts, which wait from now on."""
        for text in texts:
            text.since = self.step
        self.waiting.extend(texts)

    def plan(self, budget: Callable[[int, int], int]) -> PassPlan | None:
        """The next pass, perhaps an empty one; None where what is on its way has to be seen first.

        budget: (rows that step, prompt tokens that wait to be read) -> how many of them this pass may read.
        """
        if not self._give_way():
            return None
        self._close_ranks()
        for text in sorted((t for t in self.running if t is not None), key=lambda t: t.number):
            # one that was put back meanwhile has no row; of another all that it may get may be on its way
            if text.row >= 0 and text.room > 0 and not self._grow(text):
                return None
        plan = PassPlan(steps=[t for t in self.running if t is not None and t.room > 0])
        self._admit()
        waiting = sum(len(t.tokens) - t.computed for t in self.reading)
        for text in self.active:
            if text.sent < len(text.blocks):
                plan.tables.append((text.row, text.sent, text.blocks[text.sent :]))
                text.sent = len(text.blocks)
        if waiting and (not self.fixed or not plan.steps or self._stepped):
            self._read(plan, budget(self.high if plan.steps and not self.fixed else 0, waiting))
            plan.steps = [] if self.fixed and plan.pieces else plan.steps
        self._stepped = bool(plan.steps)
        self.step += 1
        moves, self._moves = self._moves, []
        plan.moves = [move[:2] for move in moves]
        plan.placed = [(text, text.computed) for _, target, text in moves if self.running[target] is text]
        plan.freed, self._freed = self._freed, []
        for text in plan.steps:
            text.computed += 1
            text.ahead += 1
        return plan

    def landed(self, text: Text, token: int) -> str | None:
        """Note a token that was drawn; why the text ends with it, or None."""
        text.ahead -= 1
        text.tokens.append(token)
        self._name(text)
        if token in text.request.stop_ids:
            return "stop"
        return "length" if len(text.tokens) - text.prompt >= text.request.max_tokens else None

    def end(self, text: Text) -> None:
        """Give back all that a text holds."""
        text.done = True
        if text in self.waiting:
            self.waiting.remove(text)
        self._release(text)

    def _release(self, text: Text) -> None:
        if text in self.reading:
            self.reading.remove(text)
            self._readers.append(text.row)
        elif text.row >= 0:
            self.running[text.row] = None
        if text.row >= 0:
            self._freed.append(text.row)
        self.pool.give_back(text.blocks)
        text.blocks, text.row, text.computed, text.named, text.sent, text.name = [], -1, 0, 0, 0, START

    def _close_ranks(self) -> None:
        """Move the last rows into holes where that makes the pass smaller."""
        count = sum(t is not None for t in self.running)
        while count and self.bucket(count) < self.bucket(self.high):
            source, target = self.high - 1, self.running.index(None)
            text = self.running[source]
            assert text is not None
            self.running[source], self.running[target], text.row = None, text, target
            self._freed.append(source)
            self._moves.append((source, target, text))
            text.sent = 0

    def _grow(self, text: Text) -> bool:
        """The block that a text's next slot lies in; False where what is on its way has to be seen first."""
        while text.row >= 0 and len(text.blocks) <= text.computed // self.pool.size:
            block = self.pool.take(text.blocks[-1])
            if block is not None:
                text.blocks.append(block)
                continue
            if any(t.ahead for t in self.active):
                return False
            youngest = max(self.active, key=lambda t: t.number)
            youngest.first = True
            self._put_back(youngest)
        return True

    def _give_way(self) -> bool:
        """Let a text that waits take another's place if it is its turn; False where what is on its way has to be seen first."""
        full = len(self.active) >= len(self.running)
        if self.fixed or not self.waiting or not full or self.step % GIVES_WAY:  # fixed: it would begin again
            return True
        turns = Turns([*self.waiting, *self.active], self.step)
        running = [(t, t.room) for t in self.running if t is not None]
        text = turns.gives_way(turns.next(self.waiting), running)
        if text is not None and any(t.ahead for t in self.active):
            return False
        if text is not None:
            self._put_back(text)
        return True

    def _put_back(self, text: Text) -> None:
        """A text gives back its blocks and waits again."""
        self._release(text)
        if self.fixed:
            text.repeat()
        text.since = self.step
        self._queue_again(text)
        self.preemptions += 1

    def _queue_again(self, text: Text) -> None:
        """Among those that wait, by age: it came before all that were never admitted."""
        place = sum(t.number < text.number for t in self.waiting)
        self.waiting.insert(place, text)

    def _admit(self) -> None:
        size = self.pool.size
        while self.waiting and self._readers:
            active = self.active
            if len(active) >= len(self.running):
                return
            text = self.waiting[0]
            if len(self.waiting) > 1:
                text = Turns([*self.waiting, *active], self.step).next(self.waiting)
            found, name = self.pool.find(text.tokens[:-1]) if not self.fixed else ([], START)
            wanted = len(text.tokens) // size + 1 - len(found)  # its answer's first slot has a place, too
            spare = len(active)  # blocks that those who run may want soon
            if self.pool.free - (len(found) - self.pool.held(found)) < wanted + spare:
                return
            self.waiting.remove(text)
            text.waited, text.first = text.waited + self.step - text.since, False
            self.pool.hold(found)
            text.blocks, text.named, text.name, text.computed = found, len(found), name, len(found) * size
            for _ in range(wanted):
                block = self.pool.take(text.blocks[-1] if text.blocks else 0)
                assert block is not None
                text.blocks.append(block)
            if text.cached < 0:
                text.cached = text.computed
            self.prefix_hits += text.computed
            text.row = self._readers.pop()
            text.turn = self.read + len(text.tokens) - text.computed
            self.reading.append(text)
        self.reading.sort(key=lambda t: t.turn)

    def _read(self, plan: PassPlan, budget: int) -> None:
        """Pieces of prompts, short ones first; those that are through get a row of their own.

        One that came later passes while fewer tokens were read since than it is shorter by, so nobody waits for ever. Predicted
        by serve_schedule.py for 16 users of an 8B: half of all first tokens within 26 ms in place of 29.
        """
        for text in self.reading[: 1 if self.fixed else None]:  # cut up as it would be alone
            if budget <= 0:
                break
            first, end = text.computed, min(len(text.tokens), text.computed + budget)
            plan.pieces.append((text, text.row, first, end))
            budget -= end - first
            self.read += end - first
            text.computed = end
            self._name(text)
            if end == len(text.tokens):
                self.reading.remove(text)
                self._readers.append(text.row)
                text.row = self.running.index(None)
                self.running[text.row] = text
                text.ahead = 1
                plan.finishing.append(text)

    def _name(self, text: Text) -> None:
        """Name the blocks that are full of tokens that the host has seen."""
        size, full = self.pool.size, min(text.computed, len(text.tokens))
        while not self.fixed and (text.named + 1) * size <= full:
            at = text.named * size
            text.name = self.pool.name(text.blocks[text.named], text.name, text.tokens[at : at + size])
            text.named += 1


def buckets(most: int) -> Sequence[int]:
    """Rows that steps are recorded for, up to `most`."""
    sizes = [1, 2, 4, 8, *range(16, 33, 8), *range(48, 65, 16), *range(96, most + 32, 32)]
    return [s for s in sizes if s < most] + [most]
