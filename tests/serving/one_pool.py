"""A scheduler over one pool of blocks for all layers alike, in few lines: what CacheManager with one group must equal."""

from collections import OrderedDict, deque
from types import SimpleNamespace

from lowq_cli.serving.scheduler import MOST_PREFILLING


class Pool:
    """`orphans`: whether a block was reused whose name others, still in use, come after: they could not be found again."""

    def __init__(self, blocks, size):
        self.blocks, self.size, self.orphans = blocks, size, False
        self.blank, self.kept, self.holders = OrderedDict.fromkeys(range(1, blocks)), OrderedDict(), [0] * blocks
        self.named, self.key, self.last, self.live = {}, {}, 0, []

    def free(self):
        return len(self.blank) + len(self.kept)

    def find(self, tokens):
        result, name = [], 0
        for first in range(0, len(tokens) - self.size + 1, self.size):
            entry = self.named.get((name, tuple(tokens[first : first + self.size])))
            if entry is None:
                break
            result.append(entry[0])
            name = entry[1]
        return result, name

    def hold(self, blocks):
        for block in blocks:
            self.holders[block] += 1
            self.kept.pop(block, None)

    def take(self, after):
        if after and after + 1 in self.blank:
            block = after + 1
            del self.blank[block]
        elif self.blank:
            block, _ = self.blank.popitem(last=False)
        elif self.kept:
            block, _ = self.kept.popitem(last=False)
            name = self.named.pop(self.key.pop(block))[1]
            self.orphans |= any(before == name for before, _ in self.named) or any(t.name == name for t in self.live)
        else:
            return None
        self.holders[block] = 1
        return block

    def give_back(self, blocks):
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                (self.kept if block in self.key else self.blank)[block] = None

    def name(self, block, before, tokens):
        key = before, tuple(tokens)
        if key not in self.named:
            self.last += 1
            self.named[key], self.key[block] = (block, self.last), key
        return self.named[key][1]


def text(number, request):
    return SimpleNamespace(
        **{"number": number, "request": request, "tokens": list(request.prompt), "prompt": len(request.prompt)},
        **{"blocks": [], "computed": 0, "ahead": 0, "named": 0, "sent": 0, "turn": 0, "name": 0, "row": -1, "cached": -1},
        **{"done": False, "known": []},
    )


def room(t):
    return t.request.max_tokens - (len(t.tokens) - t.prompt) - t.ahead


class Schedule:
    def __init__(self, pool, rows, bucket, fixed):
        self.pool, self.bucket, self.fixed, self.stepped = pool, bucket, fixed, True
        self.waiting, self.reading, self.running = deque(), [], [None] * rows
        self.readers, self.freed, self.moves = list(range(rows + MOST_PREFILLING - 1, rows - 1, -1)), [], []
        self.preemptions = self.prefix_hits = self.read = 0

    def active(self):
        return [*self.reading, *(t for t in self.running if t is not None)]

    def high(self):
        return max((row + 1 for row, t in enumerate(self.running) if t is not None), default=0)

    def plan(self, budget):
        self.pool.live = self.active()
        self.close_ranks()
        for t in sorted((t for t in self.running if t is not None), key=lambda t: t.number):
            if t.row >= 0 and room(t) > 0 and not self.grow(t):
                return None
        steps, pieces, finishing, tables = [t for t in self.running if t is not None and room(t) > 0], [], [], []
        self.admit()
        waiting = sum(len(t.tokens) - t.computed for t in self.reading)
        for t in self.active():
            if t.sent < len(t.blocks):
                tables.append((0, t.row, t.sent, t.blocks[t.sent :]))
                t.sent = len(t.blocks)
        if waiting and (not self.fixed or not steps or self.stepped):
            self.piece(pieces, finishing, budget(self.high() if steps and not self.fixed else 0, waiting))
            steps = [] if self.fixed and pieces else steps
        self.stepped = bool(steps)
        moves, self.moves = self.moves, []
        placed = [(t, t.computed) for _, target, t in moves if self.running[target] is t]
        freed, self.freed = self.freed, []
        for t in steps:
            t.computed, t.ahead = t.computed + 1, t.ahead + 1
        return SimpleNamespace(
            **{"steps": steps, "pieces": pieces, "finishing": finishing, "moves": [m[:2] for m in moves]},
            **{"freed": freed, "placed": placed, "tables": tables},
        )

    def on_token(self, t, token):
        t.ahead -= 1
        t.tokens.append(token)
        self.name(t)
        if token in t.request.stop_ids:
            return "stop"
        return "length" if len(t.tokens) - t.prompt >= t.request.max_tokens else None

    def end(self, t):
        t.done = True
        if t in self.waiting:
            self.waiting.remove(t)
        self.release(t)

    def release(self, t):
        if t in self.reading:
            self.reading.remove(t)
            self.readers.append(t.row)
        elif t.row >= 0:
            self.running[t.row] = None
        if t.row >= 0:
            self.freed.append(t.row)
        self.pool.give_back(t.blocks)
        t.blocks, t.row, t.computed, t.named, t.sent, t.name = [], -1, 0, 0, 0, 0

    def close_ranks(self):
        count = sum(t is not None for t in self.running)
        while count and self.bucket(count) < self.bucket(self.high()):
            source, target = self.high() - 1, self.running.index(None)
            t = self.running[source]
            self.running[source], self.running[target], t.row, t.sent = None, t, target, 0
            self.freed.append(source)
            self.moves.append((source, target, t))

    def grow(self, t):
        while t.row >= 0 and len(t.blocks) <= t.computed // self.pool.size:
            block = self.pool.take(t.blocks[-1])
            if block is not None:
                t.blocks.append(block)
                continue
            if any(other.ahead for other in self.active()):
                return False
            youngest = max(self.active(), key=lambda t: t.number)
            self.release(youngest)
            if self.fixed:
                youngest.known = max(youngest.known, youngest.tokens[youngest.prompt :], key=len)
                del youngest.tokens[youngest.prompt :]
            self.waiting.insert(sum(w.number < youngest.number for w in self.waiting), youngest)
            self.preemptions += 1
        return True

    def admit(self):
        size = self.pool.size
        while self.waiting and self.readers:
            t, active = self.waiting[0], self.active()
            if len(active) >= len(self.running):
                break
            result, name = self.pool.find(t.tokens[:-1]) if not self.fixed else ([], 0)
            expected = len(t.tokens) // size + 1 - len(result)
            if self.pool.free() - sum(not self.pool.holders[b] for b in result) < expected + len(active):
                break
            self.waiting.popleft()
            self.pool.hold(result)
            t.blocks, t.named, t.name, t.computed = result, len(result), name, len(result) * size
            for _ in range(expected):
                t.blocks.append(self.pool.take(t.blocks[-1] if t.blocks else 0))
            t.cached = t.computed if t.cached < 0 else t.cached
            self.prefix_hits += t.computed
            t.row = self.readers.pop()
            t.turn = self.read + len(t.tokens) - t.computed
            self.reading.append(t)
        self.reading.sort(key=lambda t: t.turn)

    def piece(self, pieces, finishing, budget):
        for t in self.reading[: 1 if self.fixed else None]:
            if budget <= 0:
                break
            first, end = t.computed, min(len(t.tokens), t.computed + budget)
            pieces.append((t, t.row, first, end))
            budget, self.read, t.computed = budget - (end - first), self.read + end - first, end
            self.name(t)
            if end == len(t.tokens):
                self.reading.remove(t)
                self.readers.append(t.row)
                t.row = self.running.index(None)
                self.running[t.row], t.ahead = t, 1
                finishing.append(t)

    def name(self, t):
        size, full = self.pool.size, min(t.computed, len(t.tokens))
        while not self.fixed and (t.named + 1) * size <= full:
            at = t.named * size
            t.name = self.pool.name(t.blocks[t.named], t.name, t.tokens[at : at + size])
            t.named += 1
