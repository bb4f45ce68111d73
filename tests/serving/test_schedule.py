"""Rows, tables and blocks as a GPU meets them: passes padded with nobody's rows, steps launched before the last was read.

The model is replaced by a memory: a pass writes token ids into the blocks that the tables name, and draws a number made of all
that a text's table leads to. Whatever is written into a block too many, read too early or shared wrongly changes an answer.
"""

import random

import numpy as np
import pytest
import torch
from asking import Client, build

from lowq_cli.serving.pace import Pace
from lowq_cli.serving.passes import BLOCK, RIDING
from lowq_cli.serving.request import Request
from lowq_cli.serving.schedule import READERS, buckets

V = 320


@pytest.fixture(scope="module")
def model():
    return build("llama")


def drawn(ids):
    """What follows `ids`."""
    found = 7
    for i in ids:
        found = (found * 31 + i) % 100_003
    return found % V


def alone(prompt, n, stop):
    ids = list(prompt)
    while len(ids) < len(prompt) + n:
        ids.append(drawn(ids))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


class Memory:
    """What `Passes` does, over ids in place of keys and values; most: rows that step."""

    padded = True

    def __init__(self, rows, most, blocks):
        self.rows, self.most, self.sizes, self.held = rows, most, list(buckets(most)), np.full((blocks, BLOCK), -1)
        self.pace = Pace((32, 64, 128, 256))
        self.pace.note = lambda *a: None  # the budget stays small, so that prompts come in many pieces
        self.passes = 0

    def bucket(self, n):
        return next(s for s in self.sizes if s >= n) if n else 0

    def riding(self, n):
        return min(max(RIDING, 1 << (n - 1).bit_length()), self.most) if n else 0

    def size(self, n, pieces):
        b = self.riding(n) if pieces else self.bucket(n)
        return b, b + sum(len(p.tokens) for p in pieces)

    def read(self, table, end):
        return [self.held[table[i // BLOCK], i % BLOCK] for i in range(end)]

    def run(self, n, pieces=(), of_steps=None):
        r, b, self.passes = self.rows, self.size(n, pieces)[0], self.passes + 1
        tables, pos, token, logits = r.table.numpy(), r.pos.numpy(), r.token.numpy(), np.zeros((b + READERS, V))
        for row in range(b):  # nobody's and those that have ended, too
            self.held[tables[row, pos[row] // BLOCK], pos[row] % BLOCK] = token[row]
        for p in pieces:
            for i, t in enumerate(p.tokens, p.first):
                self.held[tables[p.row, i // BLOCK], i % BLOCK] = t
        targets = np.full(b + READERS, r.nobody)
        targets[:b] = r.target[:b].numpy()
        if pieces:
            targets[:b] = r.nobody
            targets[: len(of_steps)] = of_steps
        for row in range(b):
            logits[row, drawn(self.read(tables[row], pos[row] + 1))] = 1
        for k, p in enumerate(p for p in pieces if p.first + len(p.tokens) and p.target >= 0):
            logits[b + k, drawn(self.read(tables[p.row], p.first + len(p.tokens)))] = 1
            targets[b + k] = p.target
        for i, row in enumerate(targets):
            token[row] = logits[i].argmax()
            pos[row] += row != r.nobody
        return torch.from_numpy(logits)


def shadow(engine):
    """The engine with tables that the device gets when they are flushed, as on a GPU, and a memory for a model."""
    rows = engine.rows
    for name in ("pos", "target", "table", "seed", "temperature"):
        setattr(rows, name, getattr(rows, name).clone())
    names = {"pos": "_pos", "target": "_targets", "table": "_table"}

    def flush():
        if rows._changed:
            places = np.unique(np.concatenate(rows._changed))
            rows._changed.clear()
            for name, host in names.items():
                part = {"pos": 2, "target": 3, "table": 4}[name]
                flat = getattr(rows, name).view(-1)
                mine = places - rows._starts[part]
                mine = mine[(mine >= 0) & (mine < flat.numel())]
                flat[mine] = torch.from_numpy(getattr(rows, host).reshape(-1)[mine])

    rows.flush = flush
    engine.passes, engine._ahead = Memory(rows, engine.limits.running, engine.schedule.pool.blocks), 1
    engine.schedule.bucket = engine.passes.bucket


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_each_answer_is_its_own(model, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr("asking.engine_of", lambda *a, **kw: made(*a, **kw))
    from lowq_cli.serving.engines import engine_of

    def made(*a, **kw):
        engine = engine_of(*a, **kw)
        shadow(engine)
        return engine

    c = Client(model, running=rng.choice([1, 3, 9, 20]), cache_tokens=rng.choice([256, 640, 3000]))
    commons = [[rng.randrange(V) for _ in range(n)] for n in (64, 130, 200)]
    asked, cancelled = {}, set()
    for _ in range(70):
        room = min(c.engine.limits.longest, 300)
        prompt = [*rng.choice([[], *commons])[: room - 60], *(rng.randrange(V) for _ in range(rng.randrange(1, 50)))]
        n, stop = rng.randrange(1, min(90, room - len(prompt)) + 1), frozenset(rng.sample(range(V), rng.choice([0, 0, 5, 40])))
        number = c.engine.submit(Request(tuple(prompt), n, stop))
        asked[number] = alone(prompt, n, stop)
        if rng.random() < 0.3:
            cancelled.add(rng.choice(list(asked)))
            c.engine.cancel(rng.choice(list(cancelled)))
    for number, events in zip(asked, c.follow(*asked), strict=True):
        got = [e.token for e in events if e.token is not None]
        if events[-1].finish_reason == "cancelled":
            assert number in cancelled
            assert got == asked[number][: len(got)]
        else:
            assert events[-1].finish_reason in ("stop", "length")
            assert got == asked[number]
    s = c.engine.stats()
    assert (s.running, s.waiting, s.blocks_used) == (0, 0, 0)
    c.engine.stop(0)
