"""Who computes what next: the host's decisions, without a tensor in them.

A text waits, is read (its prompt in pieces, over several passes), runs (a token a pass) and ends. A pass takes one step of all
that run and as many prompt tokens as its caller allows. The host decides on a pass before it has seen the tokens of the last
one: a text that had ended by then has one step too many, whose result no one reads. Where no block is free, the youngest text
gives back its own and waits again, its tokens so far now part of its prompt; with `fixed` it begins again.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from lowq_cli.serving.cache_groups import REWIND
from lowq_cli.serving.cache_manager import CacheManager, Match
from lowq_cli.serving.fairness import Turns
from lowq_cli.serving.sequence import Sequence

READERS = 32  # prompts that are read at once: with 16, the last of 128 of 60 tokens waits an eighth longer
GIVES_WAY = 8  # steps from one look at whether a text should give its place to another to the next


@dataclass
class StepPlan:
    """A pass: texts that step, pieces of prompts (text, row of its tables, first token, end), texts that are through with them.

    Before it, in this order: moves (from, to), one after the other; freed, rows that no text has now; placed, texts that were
    moved, and their next positions; tables (page group, row, place in it, blocks); slots (row, slot of its recurrent state);
    zero, slots to fill with zeros; copies of slots (from, to). After it: the tables and slots of those that are through, whose
    rows steps of this pass may still run in; snapshots, copies of slots (from, to).
    """

    steps: list[Sequence] = field(default_factory=list)
    pieces: list[tuple[Sequence, int, int, int]] = field(default_factory=list)
    finishing: list[Sequence] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    placed: list[tuple[Sequence, int]] = field(default_factory=list)
    tables: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    slots: list[tuple[int, int]] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """The texts of an engine, and who of them computes what next.

    Args:
        cache: what texts hold.
        rows: texts that run at once, in rows 0 .. rows - 1; readers have the READERS rows after those.
        bucket: rows in use -> rows that a pass computes; texts move together where that makes it smaller.
        fixed: prompts are read in passes of their own, and a preempted text is drawn again from its prompt on. With a cache
            that shares nothing, what a text computes is its own.
    """

    def __init__(self, cache: CacheManager, rows: int, bucket: Callable[[int], int], fixed: bool = False) -> None:
        self.cache, self.bucket, self.fixed = cache, bucket, fixed
        self._stepped, self.beyond = True, 0  # beyond: tokens behind its next for which a text has room where there is some
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.running: list[Sequence | None] = [None] * rows
        self._readers = list(range(rows + READERS - 1, rows - 1, -1))
        self._freed: list[int] = []
        self._moves: list[tuple[int, int, Sequence]] = []
        self.preemptions = self.prefix_hits = self.read = self.step = 0

    @property
    def active(self) -> list[Sequence]:
        """All that are read or run."""
        return [*self.reading, *(t for t in self.running if t is not None)]

    @property
    def admits(self) -> bool:
        """Whether a prompt is being read, or one that waits may be from the next pass on."""
        return bool(self.reading) or (bool(self.waiting) and len(self.active) < len(self.running))

    @property
    def high(self) -> int:
        """One more than the last row that runs."""
        return max((row + 1 for row, t in enumerate(self.running) if t is not None), default=0)

    def add(self, texts: Iterable[Sequence]) -> None:
        """More texts, which wait from now on."""
        for seq in texts:
            seq.since = self.step
            self.waiting.append(seq)

    def plan(
        self, budget: Callable[[int, int], int], pauses: Callable[[int, int], bool] = lambda n, m: False
    ) -> StepPlan | None:
        """The next pass, perhaps an empty one; None where what is on its way has to be seen first.

        budget: (rows that step, prompt tokens that wait to be read) -> how many of them this pass may read.
        pauses: the same -> whether no text steps in this pass.
        """
        self.cache.unwritten.clear()  # the pass before this one has been launched
        if not self._give_way():
            return None
        self._compact()
        for seq in sorted((t for t in self.running if t is not None), key=lambda t: t.number):
            # one that was put back meanwhile has no row; of another all that it may get may be on its way
            if seq.row >= 0 and self._steps(seq) and not self._allocate(seq, seq.computed + 1 + self.beyond):
                return None
        for seq in list(self.reading):  # where a window allows blocks for a part of the prompt alone
            if seq.row >= 0 and not self._allocate(seq, len(seq.tokens) + 1 + self.beyond):
                return None
        plan = StepPlan(steps=[t for t in self.running if t is not None and self._steps(t)])
        self._admit()
        waiting = sum(len(t.tokens) - t.computed for t in self.reading)
        if waiting and plan.steps and not self.fixed and pauses(self.high, waiting):
            plan.steps = []
        for seq in self.active:
            self._send(plan, seq)
        if waiting and (not self.fixed or not plan.steps or self._stepped):
            self._read(plan, budget(self.high if plan.steps and not self.fixed else 0, waiting))
            plan.steps = [] if self.fixed and plan.pieces else plan.steps
        self._stepped = bool(plan.steps)
        self.step += 1
        moves, self._moves = self._moves, []
        plan.moves = [move[:2] for move in moves]
        plan.placed = [(seq, seq.computed) for _, target, seq in moves if self.running[target] is seq]
        plan.freed, self._freed = self._freed, []
        plan.zero, self.cache.zero = self.cache.zero, []
        plan.copies, self.cache.copies = self.cache.copies, []
        for seq in plan.steps:
            seq.computed += 1
            seq.ahead += 1
            self._snapshot(plan, seq, running=True)
        return plan

    def draft(self, plan: StepPlan, seq: Sequence, n: int) -> list[int] | None:
        """Let a text that steps in this plan compute n rows more, at most REWIND: tokens that a draft supposes after its own.

        The slots to write its recurrent state to after each of its n + 1 rows but the last, none without such layers. None
        where there is no room: it then steps without a draft. With one it does not step again before `rewind` says how many of
        the rows were right.
        """
        if not 0 < n <= min(REWIND, seq.remaining):
            return None
        slots = self.cache.draft(seq, n)
        if slots is not None:
            # its state is that of the whole draft after the pass; and its slots may be snapshots that were replaced for them
            plan.snapshots = [(a, b) for a, b in plan.snapshots if not slots or (a != seq.slot and b not in slots)]
            seq.computed, seq.ahead, seq.drafting = seq.computed + n, seq.ahead + n, True
        self._send(plan, seq)  # blocks that were taken stay
        return slots

    def rewind(self, seq: Sequence, length: int) -> None:
        """Keep `length` of a text's computed tokens, the others were wrong: before `on_token` is told of those that were right.

        Raises ValueError for fewer than the host has seen, and where a window's blocks or the recurrent state are not there.
        """
        if not len(seq.tokens) <= length <= seq.computed:
            raise ValueError(f"text {seq.number} has {len(seq.tokens)} known and {seq.computed} computed tokens, not {length}")
        ahead = seq.ahead - (seq.computed - length)
        self.cache.rewind(seq, length)
        seq.ahead, seq.computed, seq.drafting = ahead, length, False

    def on_token(self, seq: Sequence, token: int) -> str | None:
        """Note a token that was drawn; why the text ends with it, or None."""
        seq.ahead -= 1
        seq.tokens.append(token)
        self.cache.name(seq)
        if token in seq.request.stop_ids:
            return "stop"
        return "length" if len(seq.tokens) - seq.prompt >= seq.request.max_tokens else None

    def end(self, seq: Sequence) -> None:
        """Give back all that a text holds."""
        seq.done = True
        if seq in self.waiting:
            self.waiting.remove(seq)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq in self.reading:
            self.reading.remove(seq)
            self._readers.append(seq.row)
        elif seq.row >= 0:
            self.running[seq.row] = None
        if seq.row >= 0:
            self._freed.append(seq.row)
        self.cache.release(seq)
        seq.row = -1

    @staticmethod
    def _steps(seq: Sequence) -> bool:
        return seq.remaining > 0 and not seq.drafting

    def _compact(self) -> None:
        """Move the last rows into holes where that makes the pass smaller."""
        count = sum(t is not None for t in self.running)
        while count and self.bucket(count) < self.bucket(self.high):
            source, target = self.high - 1, self.running.index(None)
            seq = self.running[source]
            assert seq is not None
            self.running[source], self.running[target], seq.row = None, seq, target
            self._freed.append(source)
            self._moves.append((source, target, seq))
            seq.unsent()

    def _allocate(self, seq: Sequence, most: int) -> bool:
        """Blocks for a text's next token, and for up to `most` tokens where there are free ones; False where what is on its way
        has to be seen first."""
        self.cache.trim(seq)
        while seq.row >= 0 and not self.cache.grow(seq, seq.computed + 1, most):
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
        running = [(t, t.remaining) for t in self.running if t is not None]
        seq = turns.gives_way(turns.next(self.waiting), running)
        if seq is not None and any(t.ahead for t in self.active):
            return False
        if seq is not None:
            self._put_back(seq)
        return True

    def _put_back(self, seq: Sequence) -> None:
        """A text gives back its blocks and waits again."""
        self._release(seq)
        if self.fixed:
            seq.repeat()
        seq.since, seq.rank = self.step, 0
        self._queue_again(seq)
        self.preemptions += 1

    def _queue_again(self, seq: Sequence) -> None:
        """Among those that wait, by age: it came before all that were never admitted."""
        place = sum(t.number < seq.number for t in self.waiting)
        self.waiting.insert(place, seq)

    def _next_waiting(self, waiting: Collection[Sequence]) -> Sequence:
        """Who is admitted next, of some that wait."""
        return next(iter(waiting)) if len(waiting) == 1 else Turns([*self.waiting, *self.active], self.step).next(waiting)

    def _admit(self) -> None:
        later: list[Sequence] = []  # what they begin with is being read
        while self._readers and len(later) < min(READERS, len(self.waiting)):
            seq, active = (
                self._next_waiting([t for t in self.waiting if t not in later] if later else self.waiting),
                self.active,
            )
            if len(active) >= len(self.running):
                break
            match = self.cache.match(seq)
            rank = self.read + len(seq.tokens) - match.tokens
            rank = min(seq.rank or rank, rank)
            if self._is_read_by_another(seq, match, rank):
                later.append(seq)
                seq.rank = rank
                continue
            if not self.cache.fits(seq, match, spare=len(active)):  # blocks that those who run may want soon
                break
            self.waiting.remove(seq)
            seq.waited, seq.first = seq.waited + self.step - seq.since, False
            self.cache.admit(seq, match)
            if seq.cached < 0:
                seq.cached = seq.computed
            self.prefix_hits += seq.computed
            seq.row, seq.rank = self._readers.pop(), rank
            seq.unsent()
            self.reading.append(seq)
        self.reading.sort(key=lambda t: t.rank)

    def _is_read_by_another(self, seq: Sequence, match: Match, rank: int) -> bool:
        """Whether a text that is being read comes to more of this one's beginning than the cache holds, and no later than this
        one would: of many that begin alike at the same time one is read, and if it ends before, the next."""
        for reader in self.reading:
            common = self.cache.common(seq, reader, match.tokens)
            if common > max(match.tokens, reader.computed) and reader.rank <= rank + common - match.tokens:
                self.cache.mark(reader, common)
                return True
        return False

    def _send(self, plan: StepPlan, seq: Sequence) -> None:
        """What the device does not know yet of a text's tables and slot."""
        for group, table in enumerate(seq.tables):
            plan.tables += [(group, seq.row, place, blocks) for place, blocks in table.changes()]
        if seq.slot and not seq.slot_sent:
            plan.slots.append((seq.row, seq.slot))
            seq.slot_sent = True

    def _read(self, plan: StepPlan, budget: int) -> None:
        """Pieces of prompts, short ones first; those that are through get a row of their own.

        One that came later passes while fewer tokens were read since than it is shorter by, so none waits for ever. Predicted
        by serve_schedule.py for 16 users of an 8B: half of all first tokens within 26 ms in place of 29.
        """
        for seq in self.reading[: 1 if self.fixed else None]:  # cut up as it would be alone
            if budget <= 0:
                break
            first, end = seq.computed, self.cache.piece_end(seq, min(len(seq.tokens), seq.computed + budget))
            if end - first > budget and plan.pieces:
                break  # a picture that is read in one piece: in the next pass, as the first
            plan.pieces.append((seq, seq.row, first, end))
            budget -= end - first
            self.read += end - first
            seq.computed = end
            self._snapshot(plan, seq, running=False)
            self.cache.name(seq)
            if end == len(seq.tokens):
                self.reading.remove(seq)
                self._readers.append(seq.row)
                seq.row = self.running.index(None)
                self.running[seq.row] = seq
                seq.ahead = 1
                plan.finishing.append(seq)

    def _snapshot(self, plan: StepPlan, seq: Sequence, running: bool) -> None:
        snapshot = self.cache.snapshot(seq, running)
        if snapshot:  # perhaps in the place of one that this pass would have taken
            plan.snapshots = [*(copy for copy in plan.snapshots if copy[1] != snapshot), (seq.slot, snapshot)]


def buckets(most: int) -> list[int]:
    """Rows that steps are recorded for, up to `most`."""
    sizes = [1, 2, 4, 8, *range(16, 33, 8), *range(48, 65, 16), *range(96, most + 32, 32)]
    return [s for s in sizes if s < most] + [most]
