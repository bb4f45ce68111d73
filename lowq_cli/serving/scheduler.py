"""Who computes what next: the host's decisions, without a tensor in them.

A text waits, is read (its prompt in pieces, over several passes), runs (a token a pass) and ends. A pass takes one step of all
that run and as many prompt tokens as its caller allows. The host decides on a pass before it has seen the tokens of the last
one: a text that had ended by then has one step too many, whose result nobody reads. Where no block is free, the youngest text
gives back its own and waits again, its tokens so far now part of its prompt; with `fixed` it begins again.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lowq_cli.serving.block_pool import START, BlockPool
from lowq_cli.serving.sequence import Sequence

READERS = 16  # prompts that are read at once


@dataclass
class StepPlan:
    """A pass: texts that step, pieces of prompts (text, row of its table, first token, end), texts that are through with them.

    Before it, in this order: moves (from, to), one after the other; freed, rows that no text has now; placed, texts that were
    moved, and their next slots; tables (row, place in it, blocks). Those that are through have rows that steps of this pass may
    still run in: their tables come after it.
    """

    steps: list[Sequence] = field(default_factory=list)
    pieces: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    finishing: list[Sequence] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    placed: list[tuple[Sequence, int]] = field(default_factory=list)
    tables: list[tuple[int, int, list[int]]] = field(default_factory=list)


class Scheduler:
    """The texts of an engine and what they hold.

    Args:
        pool: the cache's book.
        rows: texts that run at once, in rows 0 .. rows - 1; readers have the READERS rows after those.
        bucket: rows in use -> rows that a pass computes; texts move together where that makes it smaller.
        fixed: prompts are read in passes of their own, and nothing is shared: what a text computes is its own.
    """

    def __init__(self, pool: BlockPool, rows: int, bucket: Callable[[int], int], fixed: bool = False) -> None:
        self.pool, self.bucket, self.fixed = pool, bucket, fixed
        self._stepped = True
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.running: list[Sequence | None] = [None] * rows
        self._readers = list(range(rows + READERS - 1, rows - 1, -1))
        self._freed: list[int] = []
        self._moves: list[tuple[int, int, Sequence]] = []
        self.preemptions = self.prefix_hits = self.read = 0

    @property
    def active(self) -> list[Sequence]:
        """All that are read or run."""
        return [*self.reading, *(t for t in self.running if t is not None)]

    @property
    def high(self) -> int:
        """One more than the last row that runs."""
        return max((row + 1 for row, t in enumerate(self.running) if t is not None), default=0)

    def plan(self, budget: Callable[[int, int], int]) -> StepPlan | None:
        """The next pass, perhaps an empty one; None where what is on its way has to be seen first.

        budget: (rows that step, prompt tokens that wait to be read) -> how many of them this pass may read.
        """
        self._compact()
        for text in sorted((t for t in self.running if t is not None), key=lambda t: t.number):
            # one that was put back meanwhile has no row; of another all that it may get may be on its way
            if text.row >= 0 and text.room > 0 and not self._allocate(text):
                return None
        plan = StepPlan(steps=[t for t in self.running if t is not None and t.room > 0])
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
        moves, self._moves = self._moves, []
        plan.moves = [move[:2] for move in moves]
        plan.placed = [(text, text.computed) for _, target, text in moves if self.running[target] is text]
        plan.freed, self._freed = self._freed, []
        for text in plan.steps:
            text.computed += 1
            text.ahead += 1
        return plan

    def on_token(self, text: Sequence, token: int) -> str | None:
        """Note a token that was drawn; why the text ends with it, or None."""
        text.ahead -= 1
        text.tokens.append(token)
        self._name(text)
        if token in text.request.stop_ids:
            return "stop"
        return "length" if len(text.tokens) - text.prompt >= text.request.max_tokens else None

    def end(self, text: Sequence) -> None:
        """Give back all that a text holds."""
        text.done = True
        if text in self.waiting:
            self.waiting.remove(text)
        self._release(text)

    def _release(self, text: Sequence) -> None:
        if text in self.reading:
            self.reading.remove(text)
            self._readers.append(text.row)
        elif text.row >= 0:
            self.running[text.row] = None
        if text.row >= 0:
            self._freed.append(text.row)
        self.pool.give_back(text.blocks)
        text.blocks, text.row, text.computed, text.named, text.sent, text.name = [], -1, 0, 0, 0, START

    def _compact(self) -> None:
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

    def _allocate(self, text: Sequence) -> bool:
        """The block that a text's next slot lies in; False where what is on its way has to be seen first."""
        while text.row >= 0 and len(text.blocks) <= text.computed // self.pool.size:
            block = self.pool.take(text.blocks[-1])
            if block is not None:
                text.blocks.append(block)
                continue
            if any(t.ahead for t in self.active):
                return False
            youngest = max(self.active, key=lambda t: t.number)
            self._release(youngest)
            if self.fixed:
                youngest.repeat()
            self._queue_again(youngest)
            self.preemptions += 1
        return True

    def _queue_again(self, text: Sequence) -> None:
        """Among those that wait, by age: it came before all that were never admitted."""
        place = sum(t.number < text.number for t in self.waiting)
        self.waiting.insert(place, text)

    def _admit(self) -> None:
        size = self.pool.size
        while self.waiting and self._readers:
            text, active = self.waiting[0], self.active
            if len(active) >= len(self.running):
                return
            found, name = self.pool.find(text.tokens[:-1]) if not self.fixed else ([], START)
            wanted = len(text.tokens) // size + 1 - len(found)  # its answer's first slot has a place, too
            spare = len(active)  # blocks that those who run may want soon
            if self.pool.free - (len(found) - self.pool.held(found)) < wanted + spare:
                return
            self.waiting.popleft()
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
            text.rank = self.read + len(text.tokens) - text.computed
            self.reading.append(text)
        self.reading.sort(key=lambda t: t.rank)

    def _read(self, plan: StepPlan, budget: int) -> None:
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

    def _name(self, text: Sequence) -> None:
        """Name the blocks that are full of tokens that the host has seen."""
        size, full = self.pool.size, min(text.computed, len(text.tokens))
        while not self.fixed and (text.named + 1) * size <= full:
            at = text.named * size
            text.name = self.pool.name(text.blocks[text.named], text.name, text.tokens[at : at + size])
            text.named += 1


def buckets(most: int) -> list[int]:
    """Rows that steps are recorded for, up to `most`."""
    sizes = [1, 2, 4, 8, *range(16, 33, 8), *range(48, 65, 16), *range(96, most + 32, 32)]
    return [s for s in sizes if s < most] + [most]
