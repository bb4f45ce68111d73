"""The scheduler: it decides on the host, without tensors, what each pass computes.

A sequence waits, is prefilled (its prompt in pieces, over several passes), runs (one token per pass) and ends. A pass takes one
step of all running sequences and as many prompt tokens as the caller allows. The host plans a pass before it has read the
tokens of the last one: a sequence that ended there takes one step too many, whose result is dropped. Where no block is free,
the youngest sequence is preempted: it gives back its blocks and waits again, with its tokens so far as part of its prompt;
with `fixed` it starts again from its prompt.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from lowq_cli.serving.cache_groups import REWIND
from lowq_cli.serving.cache_manager import CacheManager, Match
from lowq_cli.serving.fairness import Turns
from lowq_cli.serving.sequence import Sequence

MOST_PREFILLING = 32  # max. prompts prefilled at once: with 16, the last of 128 prompts of 60 tokens waits an eighth longer
EARLY_S = 0.0015  # a pass is launched this many seconds before the last one ends: prompts that arrive until then join it
GIVES_WAY = 8  # steps between two checks whether a running sequence should give way to a waiting one


@dataclass
class StepPlan:
    """A pass: sequences that step; pieces of prompts (sequence, row of its tables, first token, end); `finishing`, the
    sequences whose prompt ends in this pass.

    To do before the pass, in this order: moves of rows (from, to), one after the other; freed, rows now without a sequence;
    placed, the moved sequences and their next positions; tables (page group, row, place in it, blocks); slots (row, slot of
    its recurrent state); zero, slots to fill with zeros; copies of slots (from, to). To do after the pass: write the tables
    and slots of `finishing`, in whose new rows steps of this pass may still run; snapshots, copies of slots (from, to).
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
    """The sequences of an engine, and the plan of its next pass.

    Args:
        cache: the cache space of the sequences.
        rows: max. sequences that run at once, in rows 0 .. rows - 1; prompts being prefilled use the MOST_PREFILLING rows after
            these.
        bucket: rows in use -> rows that a pass computes; sequences are compacted into lower rows where that makes it smaller.
        fixed: prompts are prefilled in separate passes, and a preempted sequence is generated again from its prompt on. With
            a cache that shares nothing, a sequence then depends on no other.
    """

    def __init__(self, cache: CacheManager, rows: int, bucket: Callable[[int], int], fixed: bool = False) -> None:
        self.cache, self.bucket, self.fixed = cache, bucket, fixed
        self._stepped, self.beyond = True, 0  # beyond: tokens after the next one to allocate for, if blocks are free
        self.waits = True  # whether a sequence with a draft in flight steps again only after its result is read
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.running: list[Sequence | None] = [None] * rows
        self._readers = list(range(rows + MOST_PREFILLING - 1, rows - 1, -1))
        self._freed: list[int] = []
        self._moves: list[tuple[int, int, Sequence]] = []
        self.preemptions = self.prefix_hits = self.read = self.step = 0

    @property
    def active(self) -> list[Sequence]:
        """All sequences that are prefilled or run."""
        return [*self.reading, *(t for t in self.running if t is not None)]

    @property
    def stepping(self) -> int:
        """The number of running sequences; where none runs, of those that will once their prompts are prefilled."""
        running = sum(t is not None for t in self.running)
        return running or min(len(self.reading) + len(self.waiting), len(self.running))

    @property
    def adapted(self) -> bool:
        """Whether a sequence that is prefilled or runs has a LoRA adapter."""
        return any(t.request.adapter for t in self.active)

    def spare(self, due: float, now: float) -> float:
        """The seconds that the next pass can wait for prompts: until shortly before `due`, when the pass on the device ends."""
        if self.waiting or self.reading or len(self.active) == len(self.running):
            return 0.0
        return due - EARLY_S - now

    def load(self, high: int, waiting: int, riding: int) -> tuple[int, int, int, int, int, bool]:
        """The arguments of a TokenBudget for a pass in which the first `high` rows step, `riding` if padded."""
        running = sum(t is not None for t in self.running) if high else 0  # 0: no sequence steps in this pass
        texts = running + len(self.reading) + len(self.waiting)
        return self.bucket(min(texts, len(self.running))), riding, waiting, running, texts, self.adapted

    @property
    def admits(self) -> bool:
        """Whether a prompt is being prefilled, or a waiting one may be from the next pass on."""
        return bool(self.reading) or (bool(self.waiting) and len(self.active) < len(self.running))

    @property
    def high(self) -> int:
        """The number of the last running row plus one."""
        return max((row + 1 for row, t in enumerate(self.running) if t is not None), default=0)

    def add(self, texts: Iterable[Sequence]) -> None:
        """Add sequences to the waiting ones."""
        for seq in texts:
            seq.since = self.step
            self.waiting.append(seq)

    def plan(
        self, budget: Callable[[int, int], int], pauses: Callable[[int, int], bool] = lambda n, m: False
    ) -> StepPlan | None:
        """Return the next pass, which may be empty; None where passes in flight have to be read first.

        budget: (rows that step, prompt tokens that wait to be prefilled) -> how many of these tokens this pass may take.
        pauses: (the same arguments) -> whether the pass takes prompt tokens only and no sequence steps.
        """
        self.cache.unwritten.clear()  # the pass before this one has been launched
        if not self._give_way():
            return None
        self._compact()
        for seq in sorted((t for t in self.running if t is not None), key=lambda t: t.number):
            # a sequence preempted in this loop has no row; another may have all its remaining tokens in flight
            if seq.row >= 0 and self._steps(seq) and not self._allocate(seq, seq.computed + 1 + self.beyond):
                return None
        for seq in list(self.reading):  # needed where a window allows blocks for only a part of the prompt
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
            self._prefill(plan, budget(self.high if plan.steps and not self.fixed else 0, waiting))
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
        """Let a sequence that steps in this plan compute n more rows, at most REWIND: its draft tokens.

        Returns the slots to write its recurrent state to after each of its n + 1 rows but the last ([] without recurrent
        layers), or None where there is no room: it then steps without a draft. With a draft, it does not step again before
        `wrong` says how many of the rows were, unless not `waits`.
        """
        if not 0 < n <= min(REWIND, seq.remaining - (not self.waits)):  # else it may not step in the next pass, as its row will
            return None
        slots = self.cache.draft(seq, n)
        if slots is not None:
            # after the pass its state includes the whole draft; and its slots may be those of snapshots evicted for them
            plan.snapshots = [(a, b) for a, b in plan.snapshots if not slots or (a != seq.slot and b not in slots)]
            seq.computed, seq.ahead, seq.drafting = seq.computed + n, seq.ahead + n, self.waits
        self._send(plan, seq)  # also without a draft: blocks that `cache.draft` took stay
        return slots

    def rewind(self, seq: Sequence, length: int) -> None:
        """Keep the first `length` computed tokens of a sequence; the rest were wrong. Call it before `on_token` for the others.

        Raises ValueError for fewer tokens than the host has read, and where a window's blocks or the recurrent state are gone.
        """
        if not len(seq.tokens) <= length <= seq.computed:
            raise ValueError(f"text {seq.number} has {len(seq.tokens)} known and {seq.computed} computed tokens, not {length}")
        ahead = seq.ahead - (seq.computed - length)
        self.cache.rewind(seq, length)
        seq.ahead, seq.computed, seq.drafting = ahead, length, False

    def wrong(self, seq: Sequence, n: int, tokens: int) -> None:
        """Record that n rows of a draft were wrong and that `tokens` tokens come. Call it before `on_token`.

        The blocks after these are given back unless a later pass, in flight, writes to them.
        """
        if seq.ahead == n + tokens:
            self.rewind(seq, len(seq.tokens) + tokens - 1)
        else:
            seq.computed, seq.ahead = seq.computed - n, seq.ahead - n

    def on_token(self, seq: Sequence, token: int) -> str | None:
        """Add a sampled token; return the finish reason if the sequence ends with it, or None."""
        seq.ahead -= 1
        seq.tokens.append(token)
        self.cache.name(seq)
        if token in seq.request.stop_ids:
            return "stop"
        return "length" if len(seq.tokens) - seq.prompt >= seq.request.max_tokens else None

    def end(self, seq: Sequence) -> None:
        """End a sequence and free everything it holds."""
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

    @property
    def compacts(self) -> bool:
        """Whether the next plan moves rows. The position of a sequence that moves has to be known."""
        count = sum(t is not None for t in self.running)
        return count > 0 and self.bucket(count) < self.bucket(self.high)

    def _compact(self) -> None:
        """Move the last rows into free rows where that makes the pass smaller."""
        while self.compacts:
            source, target = self.high - 1, self.running.index(None)
            seq = self.running[source]
            assert seq is not None
            self.running[source], self.running[target], seq.row = None, seq, target
            self._freed.append(source)
            self._moves.append((source, target, seq))
            seq.unsent()

    def _allocate(self, seq: Sequence, most: int) -> bool:
        """Allocate blocks for a sequence's next token, and for up to `most` tokens where blocks are free; False where passes in
        flight have to be read first."""
        self.cache.trim(seq)
        while seq.row >= 0 and not self.cache.grow(seq, seq.computed + 1, most):
            if any(t.ahead for t in self.active):
                return False
            youngest = max(self.active, key=lambda t: t.number)
            youngest.first = True
            self._put_back(youngest)
        return True

    def _give_way(self) -> bool:
        """Preempt a running sequence if it is a waiting one's turn; False where passes in flight have to be read first."""
        full = len(self.active) >= len(self.running)
        if self.fixed or not self.waiting or not full or self.step % GIVES_WAY:  # fixed: it would start from its prompt
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
        """Preempt a sequence: it gives back its blocks and waits again."""
        self._release(seq)
        if self.fixed:
            seq.repeat()
        seq.since, seq.rank = self.step, 0
        self._queue_again(seq)
        self.preemptions += 1

    def _queue_again(self, seq: Sequence) -> None:
        """Insert a preempted sequence into the waiting ones by age, before all that were never admitted."""
        place = sum(t.number < seq.number for t in self.waiting)
        self.waiting.insert(place, seq)

    def _next_waiting(self, waiting: Collection[Sequence]) -> Sequence:
        """Return which of these waiting sequences is admitted next."""
        return next(iter(waiting)) if len(waiting) == 1 else Turns([*self.waiting, *self.active], self.step).next(waiting)

    def _admit(self) -> None:
        later: list[Sequence] = []  # sequences whose prefix another one is prefilling now
        while self._readers and len(later) < min(MOST_PREFILLING, len(self.waiting)):
            seq = self._next_waiting([t for t in self.waiting if t not in later] if later else self.waiting)
            active = self.active
            if len(active) >= len(self.running):
                break
            match = self.cache.match(seq)
            rank = self.read + len(seq.tokens) - match.tokens
            rank = min(seq.rank or rank, rank)
            if self._is_read_by_another(seq, match, rank):
                later.append(seq)
                seq.rank = rank
                continue
            if not self.cache.fits(seq, match, spare=len(active)):  # spare: blocks that active sequences may need soon
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
        """Return whether a sequence being prefilled will compute more of this one's prefix than the cache holds, no later than
        this one would itself. Of many sequences with one prefix, one computes it, and if that one ends early, the next."""
        for reader in self.reading:
            common = self.cache.common(seq, reader, match.tokens)
            if common > max(match.tokens, reader.computed) and reader.rank <= rank + common - match.tokens:
                self.cache.mark(reader, common)
                return True
        return False

    def _send(self, plan: StepPlan, seq: Sequence) -> None:
        """Add the parts of a sequence's tables and slot that the device does not have yet to the plan."""
        for group, table in enumerate(seq.tables):
            plan.tables += [(group, seq.row, place, blocks) for place, blocks in table.changes()]
        if seq.slot and not seq.slot_sent:
            plan.slots.append((seq.row, seq.slot))
            seq.slot_sent = True

    def _prefill(self, plan: StepPlan, budget: int) -> None:
        """Add pieces of prompts to the plan, short prompts first; a sequence whose prompt ends here gets a row that runs.

        A later prompt overtakes an earlier one only while the tokens prefilled in between are fewer than the difference of
        their lengths, so that none waits for ever. serve_schedule.py predicts, for 16 users of an 8B, half of all first tokens
        within 26 ms instead of 29 ms.
        """
        for seq in self.reading[: 1 if self.fixed else None]:  # fixed: the pieces are the same as if it were alone
            if budget <= 0:
                break
            first, end = seq.computed, self.cache.piece_end(seq, min(len(seq.tokens), seq.computed + budget))
            if end - first > budget and plan.pieces:
                break  # an image that has to be in one piece: it comes first in the next pass
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
        if snapshot:  # its slot may be that of another snapshot of this pass, which it then replaces
            plan.snapshots = [*(copy for copy in plan.snapshots if copy[1] != snapshot), (seq.slot, snapshot)]
