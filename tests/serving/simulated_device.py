"""A device for step plans without a model: what a layer would hold of a token is a number made of all tokens up to it.

Each pass is carried out when it is planned, as its stream does in order; the host hears of its tokens later. Whatever is read
is compared with what the text's own tokens make, so that a block that was freed too early, shared wrongly, restored from the
wrong snapshot or named before its time fails in the pass that reads it.
"""

import random
from collections import Counter, deque
from itertools import count

from lowq_cli.serving.block_pool import START, name_after
from lowq_cli.serving.cache_groups import REWIND, Group
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.pass_sizes import buckets
from lowq_cli.serving.request import Request
from lowq_cli.serving.scheduler import MOST_PREFILLING, Scheduler
from lowq_cli.serving.sequence import Sequence

SIZE = 16
V = 3  # tokens there are: few, so that texts begin alike
NOTHING = -1


class Checked(CacheManager):
    """A cache whose matches are compared with a search through all beginnings, longest first."""

    def match(self, seq):
        result, names = super().match(seq), [START]
        for first in range(0, len(seq.tokens) - SIZE + 1, SIZE):
            names.append(name_after(names[-1], seq.tokens[first : first + SIZE]))

        def there(n):
            for group in self.pages:
                first = max(0, n * SIZE - group.window + 1) if group.window else 0
                if not all(group.find(names[i // SIZE + 1]) for i in range(first, n * SIZE)):
                    return False
            return self.states is None or n == 0 or self.states.find(names[n]) + self.host_states.find(names[n]) > 0

        longest = next(n for n in range((len(seq.tokens) - 1) // SIZE, -1, -1) if there(n)) if self.shared else 0
        assert result.tokens == longest * SIZE
        return result


class Truth:
    """The tokens of a text as the device has them, and the number that each beginning makes."""

    def __init__(self, prompt):
        self.tokens, self.sums = [], [7]
        for token in prompt:
            self.add(token)

    def add(self, token):
        self.tokens.append(token)
        self.sums.append(after(self.sums[-1], token))

    @property
    def next(self):
        """The token that is drawn after all of them."""
        return self.sums[-1] % 1009 % V


def after(number, token):
    return (number * 1_000_003 + token + 1) % (1 << 61)


class Device:
    def __init__(self, windows, blocks, rows, slots, width, host):
        self.windows, self.rows = windows, rows
        self.pages = [[[NOTHING] * SIZE for _ in range(n)] for n in blocks]
        self.tables = [[[0] * width for _ in range(rows + MOST_PREFILLING)] for _ in blocks]
        self.slot, self.state = [0] * (rows + MOST_PREFILLING), [NOTHING] * slots
        self.away = [[NOTHING] * (n + 1) for n in host]

    def swap(self, swaps):
        for s in swaps:
            here, there = [*self.pages, self.state][s.group], self.away[s.group]
            whole = here[s.block] if s.out else there[s.place]
            whole = list(whole) if isinstance(whole, list) else whole
            (there if s.out else here)[s.place if s.out else s.block] = whole

    def before(self, plan):
        for row in plan.freed:
            self.slot[row] = 0
            for table in self.tables:
                table[row] = [0] * len(table[row])
        for group, row, place, blocks in plan.tables:
            self.tables[group][row][place : place + len(blocks)] = blocks
        for row, slot in plan.slots:
            self.slot[row] = slot
        for slot in plan.zero:
            self.state[slot] = Truth(()).sums[0]
        for source, target in plan.copies:
            self.state[target] = self.state[source]

    def compute(self, row, sums, position):
        """The token at a position of the text with these numbers of its beginnings."""
        for group, (pages, table) in enumerate(zip(self.pages, self.tables, strict=True)):
            window = self.windows[group] or position + 1
            block = table[row][position // SIZE]
            assert block
            pages[block][position % SIZE] = sums[position + 1]
            for i in range(max(0, position - window + 1), position + 1):
                assert table[row][i // SIZE]
                assert pages[table[row][i // SIZE]][i % SIZE] == sums[i + 1]
        if self.slot[row]:
            assert self.state[self.slot[row]] == sums[position]
            self.state[self.slot[row]] = sums[position + 1]

    def spoil(self, row, position):
        """What a pass does in a row below its last that has nothing to compute."""
        self.state[self.slot[row]] = NOTHING
        for pages, table in zip(self.pages, self.tables, strict=True):
            pages[table[row][position // SIZE]][position % SIZE] = NOTHING

    def after(self, plan):
        for seq in plan.finishing:
            self.slot[seq.row] = seq.slot
            for group, table in enumerate(seq.tables):
                self.tables[group][seq.row][: len(table.blocks)] = table.blocks
        for source, target in plan.snapshots:
            self.state[target] = self.state[source]


class Driver:
    """Random requests, cancellations and drafts for a scheduler; its passes computed and checked."""

    def __init__(self, rng, groups, blocks, rows, snapshots=0, fixed=False, piece=40, ahead=1, drafts=0.0, host=()):
        self.rng, self.groups, self.piece, self.ahead, self.drafts = rng, groups, piece, ahead, drafts
        recurrent, sizes = any(g.recurrent for g in groups), buckets(rows)
        self.host = [*host, *[0] * (len(blocks) + 1 - len(host))] if not fixed else [0] * (len(blocks) + 1)
        texts = rows if recurrent else 0
        self.cache = Checked(groups, blocks, SIZE, piece, texts, snapshots, not fixed, host=self.host)
        self.scheduler = Scheduler(self.cache, rows, lambda n: next(s for s in sizes if s >= n) if n else 0, fixed)
        paged = [g for g in groups if not g.recurrent]
        self.longest = min([320, *(g.longest(n, SIZE, 320) for g, n in zip(paged, blocks, strict=True))])
        slots = 1 + rows + snapshots if recurrent else 1
        self.device = Device([g.window for g in paged], blocks, rows, slots, self.longest // SIZE + 4, self.host)
        self.texts, self.truths, self.beginnings = {}, {}, {}
        self.numbers, self.flights, self.commons = (
            count(1),
            deque(),
            [[rng.randrange(V) for _ in range(n)] for n in (35, 90, 130)],
        )
        self.seen = Counter()

    def submit(self):
        rng, number = self.rng, next(self.numbers)
        prompt = [*rng.choice([[], *self.commons]), *(rng.randrange(V) for _ in range(rng.randrange(1, 60)))]
        if self.truths and rng.random() < 0.4:  # a conversation goes on
            prompt = [*rng.choice(list(self.truths.values())).tokens, *prompt[: rng.randrange(1, 30)]]
        prompt = prompt[: self.longest - rng.randrange(1, 100)] or [1]
        n = rng.randrange(1, min(110, self.longest - len(prompt)) + 1)
        seq = Sequence(number, Request(tuple(prompt), n, frozenset(rng.sample(range(V + 60), 20))))
        self.texts[number], self.truths[number] = seq, Truth(prompt)
        self.scheduler.waiting.append(seq)

    def cancel(self):
        if self.texts:
            seq = self.rng.choice(list(self.texts.values()))
            self.seen["cancelled"] += seq.row >= 0
            self.finish(seq)

    def finish(self, seq):
        self.scheduler.end(seq)
        del self.texts[seq.number]

    def budget(self, high, waiting):
        return self.piece if self.scheduler.fixed else self.rng.choice([1, 7, self.piece // 2, self.piece])

    def turn(self):
        plan = self.scheduler.plan(self.budget)
        if plan is None:
            assert self.flights
            return self.land(0)
        drafts = {}
        for seq in plan.steps:
            if self.rng.random() < self.drafts and not self.scheduler.fixed:
                n = self.rng.randrange(1, REWIND + 1)
                slots = self.scheduler.draft(plan, seq, n)
                if slots is not None:
                    drafts[seq.number] = n, slots
                    self.seen["drafts"] += 1
        self.run(plan, drafts)
        self.land(self.ahead if plan.steps or plan.pieces else 0)
        return None

    def run(self, plan, drafts):
        device, drew, high = self.device, [], max((t.row + 1 for t in plan.steps), default=0)
        self.count(plan)
        self.flush()
        device.before(plan)
        for seq in self.scheduler.active:
            for held, table in zip(seq.tables, device.tables, strict=True):
                n, row = len(held.blocks), table[seq.row]
                assert seq in plan.finishing or (row[:n] == held.blocks and (seq in self.scheduler.reading or not any(row[n:])))
        self.check_writes(plan)
        for seq, row, first, end in plan.pieces:
            assert first < end <= len(seq.tokens)
            for position in range(first, end):
                device.compute(row, self.truths[seq.number].sums, position)
        for row in range(high):
            seq = self.scheduler.running[row]
            if seq is None or seq in plan.finishing:
                assert not any(any(table[row]) for table in device.tables)
                assert not device.slot[row]
            if seq not in plan.steps and not (seq is not None and seq.drafting):
                device.spoil(row, seq.computed if seq is not None else 0)
        for seq in plan.steps:
            truth = self.truths[seq.number]
            n, slots = drafts.get(seq.number, (0, []))
            first = seq.computed - n - 1
            again = len(truth.tokens) - first - 1  # tokens that were drawn before it was put back to its prompt
            assert again == 0 or self.scheduler.fixed
            if not n:
                device.compute(seq.row, truth.sums, first)
                if not again:
                    truth.add(truth.next)
                drew.append((seq, [truth.tokens[first + 1]], None))
            else:
                drew.append((seq, *self.draft(seq, truth, first, n, slots)))
        for seq in plan.finishing:
            truth = self.truths[seq.number]
            if len(truth.tokens) == len(seq.tokens):
                truth.add(truth.next)
            drew.append((seq, [truth.tokens[len(seq.tokens)]], None))
        device.after(plan)
        self.flights.append(drew)

    def flush(self):
        """The copies to and from host memory that come before a pass."""
        swaps, self.cache.swaps = self.cache.swaps, []
        for s in swaps:
            self.seen["states out" if s.out and s.group == len(self.cache.pages) else "out" if s.out else "in"] += 1
        self.device.swap(swaps)

    def draft(self, seq, truth, first, n, slots):
        """n rows more than one: the tokens that are right and the one drawn after them, and how many are computed rightly."""
        supposed = Truth(truth.tokens)
        for i in range(n + 1):
            self.device.compute(seq.row, supposed.sums, first + i)
            if i < n:
                if slots:
                    self.device.state[slots[i]] = self.device.state[seq.slot]
                supposed.add(supposed.next if self.rng.random() < 0.8 else (supposed.next + 1) % V)
        given = []
        for token in [*supposed.tokens[first + 1 :], None]:
            given.append(truth.next)
            truth.add(truth.next)
            if given[-1] != token:
                break
        return given, first + len(given)

    def land(self, most):
        while len(self.flights) > most:
            for seq, tokens, length in self.flights.popleft():
                if seq.done:
                    continue
                if length is not None:
                    self.seen["rewound"] += length < seq.computed
                    self.scheduler.rewind(seq, length)
                for token in tokens:
                    if self.scheduler.on_token(seq, token):
                        self.finish(seq)
                        break

    def count(self, plan):
        self.seen["passes"] += 1
        for name in ("moves", "zero", "copies", "snapshots"):
            self.seen[name] += len(getattr(plan, name))
        self.seen["given back"] += sum(t.first > 0 for s in self.scheduler.active for t in s.tables)
        made = [*plan.zero, *(target for _, target in plan.copies)]  # in any order
        assert len(set(made)) == len(made)
        assert len({target for _, target in plan.snapshots}) == len(plan.snapshots)

    def check_writes(self, plan):
        """No block is written that another text holds, or that has a name from before this pass."""
        spans = [(s, first, end) for s, _, first, end in plan.pieces] + [(s, s.computed - 1, s.computed) for s in plan.steps]
        for seq, first, end in spans:
            for group, table in zip(self.cache.pages, seq.tables, strict=True):
                for i in range(first // SIZE, (end - 1) // SIZE + 1):
                    block = table.blocks[i]
                    assert group.pool.holders[block] == 1
                    assert block not in group.pool.names or (i + 1) * SIZE <= end  # named by this very pass

    def check(self):
        """Each block has the holders that tables say, each slot one use, each name the contents that it stands for."""
        for g, group in enumerate(self.cache.pages):
            pool, held = group.pool, Counter()
            for seq in self.scheduler.active:
                table, window = seq.tables[g], self.groups_paged[g]
                held.update(filter(None, table.blocks))
                assert not any(table.blocks[: table.first])
                assert all(table.blocks[table.first :])
                n = len(table.blocks) - table.first
                assert not window.window or n <= window.blocks(len(seq.tokens) + REWIND + 2, SIZE, self.piece)
            assert all(pool.holders[b] == held[b] for b in range(pool.blocks))
            idle = pool.unheld()
            assert sorted([*pool.blank, *(block for _, block in idle), *held]) == list(range(1, pool.blocks))
            assert all(pool.names[block] == name for name, block in idle)
            for block, name in pool.names.items():
                assert pool.find(name) == block
                assert self.device.pages[g][block] == self.contents(name)
        if (states := self.cache.states) is not None:
            active = self.scheduler.active
            free = [states.take() for _ in range(states.free)]
            for slot in free:  # in the same order again
                states.give_back(slot)
            assert sorted([*free, *(s.slot for s in active)]) == list(range(1, states.texts + 1))
            used = [slot for s in active for _, slot in [*s.pending, *s.drafts]]
            total = range(states.texts + 1, states.texts + states.snapshots + 1)
            assert sorted([*states.blank, *states.named.values(), *used]) == list(total)
            for name, slot in states.named.items():
                assert self.device.state[slot] == self.contents(name)[-1]
        for g, host in enumerate([*(p.host for p in self.cache.pages), self.cache.host_states]):
            places = [*host.free, *host.named.values()]
            assert sorted(places) == list(range(1, host.places + 1))
            for name, place in host.named.items() if not self.cache.swaps else ():
                whole, expected = self.device.away[g][place], self.contents(name)
                assert whole == (expected if g < len(self.cache.pages) else expected[-1])
        for seq in self.scheduler.waiting:
            assert [seq.tables, seq.slot, seq.pending, seq.drafts] == [[], 0, [], []]

    @property
    def groups_paged(self):
        return [g for g in self.groups if not g.recurrent]

    def contents(self, name):
        """The numbers of the tokens in the block of this name, by the tokens that texts really had."""
        if name not in self.beginnings:
            for truth in self.truths.values():
                before = START
                for first in range(0, len(truth.tokens) - SIZE + 1, SIZE):
                    before = name_after(before, truth.tokens[first : first + SIZE])
                    self.beginnings[before] = truth.sums[first + 1 : first + SIZE + 1]
        return self.beginnings[name]

    def empty(self):
        """Finish all there is; nothing may be held then."""
        while self.texts:
            self.turn()
        self.land(0)
        self.check()
        assert self.cache.used == 0
        assert not self.scheduler.active
        self.cache.store_all()
        self.flush()
        self.check()


def mixed(rng):
    """Groups of one model or another."""
    windows = [rng.choice([1, 5, 16, 40, 100, 250]) for _ in range(rng.choice([1, 1, 2]))]
    return rng.choice(
        [
            [Group()],
            [Group(), *map(Group, windows)],
            list(map(Group, windows)),
            [Group(), Group(recurrent=True)],
            [Group(recurrent=True), *map(Group, windows), Group()],
            [*map(Group, windows), Group(recurrent=True)],
            [Group(recurrent=True)],
        ]
    )


def driver(seed, **how):
    rng = random.Random(seed)
    groups = how.pop("groups", None) or mixed(rng)
    blocks = [rng.choice([9, 14, 22, 40, 120]) for g in groups if not g.recurrent]
    how = {
        "snapshots": rng.choice([0, 1, 3, 12, 40]),
        "rows": rng.choice([1, 2, 5, 12]),
        "drafts": rng.choice([0, 0.1, 0.4]),
    } | how
    if rng.random() < 0.5:
        how = {"host": [rng.choice([0, 1, 5, 30, 200]) for _ in range(len(blocks) + 1)]} | how
    how = {"piece": rng.choice([20, 64, 200]), "ahead": rng.choice([0, 1, 1]), "fixed": rng.random() < 0.15} | how
    return Driver(rng, groups, how.pop("blocks", blocks), **how)
