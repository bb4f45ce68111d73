"""Rows, tables and blocks as a GPU meets them: passes padded with null rows, steps launched before the last was read.

The model is replaced by a memory: a pass writes token ids into the blocks that the tables name, and draws a number made of all
that a text's table leads to. Whatever is written into a block too many, read too early or shared wrongly changes an answer.
"""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from asking import Client, build

from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.cache_groups import Group
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.pass_sizes import PassSizes
from lowq_cli.serving.request import Request
from lowq_cli.serving.scheduler import EARLY_S, MOST_PREFILLING, Scheduler
from lowq_cli.serving.sequence import Sequence
from lowq_cli.serving.token_budget import TokenBudget

V = 320


@pytest.fixture(scope="module")
def model():
    return build("llama")


def drawn(ids):
    """What follows `ids`."""
    result = 7
    for i in ids:
        result = (result * 31 + i) % 100_003
    return result % V


def alone(prompt, n, stop):
    ids = list(prompt)
    while len(ids) < len(prompt) + n:
        ids.append(drawn(ids))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


class Memory:
    """What `ModelRunner` does, over ids in place of keys and values; most: rows that step."""

    def __init__(self, rows, most, blocks):
        self.rows, self.sizes, self.held = rows, PassSizes(most), np.full((blocks, BLOCK), -1)
        self.token_budget = TokenBudget((32, 64, 128, 256))
        self.token_budget.note = lambda *a: None  # the budget stays small, so that prompts come in many pieces
        self.passes = 0

    def zero(self, slots):
        assert not slots  # no layer of it is recurrent

    def copy(self, pairs):
        assert not pairs

    def adapted(self, n, rows):
        return False

    def read(self, table, end):
        return [self.held[table[i // BLOCK], i % BLOCK] for i in range(end)]

    def run(self, n, pieces=(), of_steps=None):
        r, b, self.passes = self.rows, self.sizes.size(n, sum(len(p.tokens) for p in pieces))[0], self.passes + 1
        tables, pos, token, logits = r.tables[0].numpy(), r.pos.numpy(), r.token.numpy(), np.zeros((b + MOST_PREFILLING, V))
        order = r.order[:b].tolist()
        steps = [row for row in range(n) if of_steps[row] != r.null_row]
        assert sorted(order) == list(range(b))
        assert sorted(order[: len(steps)]) == steps
        assert all(pos[i] >= pos[j] for i, j in pairwise(order[: len(steps)]))  # the longest first
        for row in range(b):  # null rows and those that have ended, too
            self.held[tables[row, pos[row] // BLOCK], pos[row] % BLOCK] = token[row]
        for p in pieces:
            for i, t in enumerate(p.tokens, p.first):
                self.held[tables[p.row, i // BLOCK], i % BLOCK] = t
        targets = np.full(b + MOST_PREFILLING, r.null_row)
        targets[:b] = r.target[:b].numpy()
        if pieces:
            targets[:b] = r.null_row
            targets[: len(of_steps)] = of_steps
        for row in range(b):
            logits[row, drawn(self.read(tables[row], pos[row] + 1))] = 1
        for k, p in enumerate(p for p in pieces if p.first + len(p.tokens) and p.target >= 0):
            logits[b + k, drawn(self.read(tables[p.row], p.first + len(p.tokens)))] = 1
            targets[b + k] = p.target
        for i, row in enumerate(targets):
            token[row] = logits[i].argmax()
            pos[row] += row != r.null_row
        return torch.from_numpy(logits)


def shadow(engine):
    """The engine with tables that the device gets when they are flushed, as on a GPU, and a memory for a model."""
    given = engine.passes.rows
    rows = BatchState(given.null_row, [table.shape[1] for table in given.tables], engine.device, separate=True)
    engine.pipeline.special.rows, engine.pipeline.ahead = rows, 1
    engine.passes = engine.pipeline.passes = Memory(rows, engine.limits.running, engine.scheduler.cache.blocks + 1)
    engine.scheduler.bucket = engine.passes.sizes.bucket


@pytest.mark.parametrize("seed", range(6))
def test_each_answer_is_its_own_in_random_arrivals_and_departures(model, seed):
    rng = random.Random(seed)

    def made(*a, **kw):
        engine = engine_of(*a, **kw)
        shadow(engine)
        return engine

    c = Client(model, engine=made, running=rng.choice([1, 3, 9, 20]), cache_tokens=rng.choice([256, 640, 3000]))
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
        result = [e.token for e in events if e.token is not None]
        if events[-1].finish_reason == "cancelled":
            assert number in cancelled
            assert result == asked[number][: len(result)]
        else:
            assert events[-1].finish_reason in ("stop", "length")
            assert result == asked[number]
    s = c.engine.stats()
    assert (s.running, s.waiting, s.blocks_used) == (0, 0, 0)
    c.engine.stop(0)


def paced():
    """A TokenBudget that knows steps of 64 rows, and passes of 128 to 1,024 in which they ride."""
    budget = TokenBudget((128, 256, 512, 1024))
    budget.note(64, 64, 0.004)
    for rows, seconds in {128: 0.005, 256: 0.008, 512: 0.012, 1024: 0.022}.items():
        budget.note(64, rows, seconds)
    return budget


def test_prompt_tokens_per_pass_are_bounded_by_the_step_time():
    budget = paced()
    assert budget.prompt_tokens(64, 64, 100, 60, 60) == 100  # no more than there are
    budget.late = 100.0  # nothing longer is due
    assert budget.prompt_tokens(64, 64, 5000, 60, 60) == 256 - 64  # 8 ms in a pass of 2.6 steps of 4 ms
    for _ in range(40):
        budget.note(64, 64, 0.006)  # attention takes 2 ms more now, in every pass
    assert budget.prompt_tokens(64, 64, 5000, 60, 60) == 512 - 64
    for _ in range(40):
        budget.note(64, 64, 0.006)
        budget.note(64, 512, 0.0195)  # and prompts 5.5 ms more than in the dummy measurement
    assert budget.extra == pytest.approx(0.002, rel=0.05)
    assert budget.riding == pytest.approx(0.0055, rel=0.05)
    assert budget.prompt_tokens(64, 64, 5000, 60, 60) == 256 - 64
    assert budget.prompt_tokens(64, 0, 5000, 0, 3) == 1024  # no running sequence


def test_long_passes_come_as_often_as_few_tokens_wait_for_them():
    budget = paced()
    rooms = [budget.prompt_tokens(64, 64, 5000, 16, 64) for _ in range(8)]
    assert rooms == [*[960] * 2, *[192] * 6]  # 38 tokens in advance are two passes with 16 texts in them
    for _ in range(3000):
        budget.stepped(16)
    assert budget.prompt_tokens(64, 64, 5000, 16, 64) == 192  # they have had theirs
    budget.stepped(12)
    assert budget.prompt_tokens(64, 64, 5000, 12, 64) == 960  # those that came in the place of four have not
    assert budget.prompt_tokens(64, 64, 5000, 12, 64) == 192
    slow = paced()
    slow.note(64, 1024, 0.022)
    for _ in range(60):
        slow.note(64, 64, 0.150)  # no pass takes under a tenth of a second
    assert slow.prompt_tokens(64, 64, 5000, 16, 64) == 1024 - 64  # 0.17 s is 1.1 steps


def test_an_unknown_size_takes_after_the_nearest_that_is_known_by_now():
    budget = TokenBudget((64, 512, 4096))
    budget.known = {(8, 64, False): 0.002}
    assert budget.seconds(8, 4096) == 0.002 * 4096 / 64
    for rows, seconds in ((512, 0.008), (2048, 0.024)):
        budget.known[8, rows, False] = seconds
        assert budget.seconds(8, 4096) == seconds * 4096 / rows
    assert budget.seconds(8, 8) == 0.0  # no pass without prompts is known
    budget.known[4, 4, False] = 0.001
    assert budget.seconds(8, 8) == 0.001


def test_pass_times_of_a_busy_gpu_are_corrected_by_the_first_pass():
    """Three engines started on one GPU: all passes were thought to take 2.5 times as long, until each had come."""
    alone, busy = paced(), paced()
    for size in busy.known:
        busy.known[size] *= 2.5
    busy.begin()
    busy.note(64, 256, 0.008)
    for size in ((64, 64), (64, 128), (64, 256), (64, 512), (32, 1024)):
        assert busy.seconds(*size) == pytest.approx(alone.seconds(*size))
    assert busy.prompt_tokens(64, 64, 5000, 60, 60) == alone.prompt_tokens(64, 64, 5000, 60, 60)
    busy.note(64, 64, 0.006)  # first seen with running texts: 4 ms are the pass's own
    assert busy.known[64, 64, False] == pytest.approx(0.004)
    assert 0 < busy.extra < 0.002
    alone.begin()
    alone.note(64, 256, 0.007)  # an eighth less is chance
    assert alone.seconds(64, 512) == 0.012


def test_short_prompts_are_read_first_and_a_long_one_waits_for_a_bounded_time():
    scheduler, read = Scheduler(CacheManager([Group()], [1000], BLOCK, 100), 200, lambda n: n), []
    scheduler.waiting.extend(Sequence(i, Request((i,) * n, 1)) for i, n in enumerate((600, 100, 300)))
    for number in range(10, 60):
        plan = scheduler.plan(lambda high, waiting: 100)
        read += [text.number for text, _, first, end in plan.pieces for _ in range(first, end)]
        for text in plan.finishing:
            scheduler.on_token(text, 7)
            scheduler.end(text)
        scheduler.waiting.append(Sequence(number, Request((number,) * 100, 1)))  # a short one again with every pass
    assert read[:100] == [1] * 100
    first = read.index(0)
    assert first == 800  # 400 of those that came with it, 400 of those that came before 500 were read
    assert read[first : first + 600] == [0] * 600


def test_a_pass_waits_for_prompts_until_shortly_before_the_one_before_it_ends():
    s = Scheduler(CacheManager([Group()], [100], BLOCK, 64), 2, lambda n: n)
    assert s.spare(10.004, 10.0) == pytest.approx(0.004 - EARLY_S)
    s.waiting.append("somebody")
    assert s.spare(10.004, 10.0) == 0
    s.waiting.clear()
    s.running = ["somebody", "somebody else"]
    assert s.spare(10.004, 10.0) == 0  # no request could come
