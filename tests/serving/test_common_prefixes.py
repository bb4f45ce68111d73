"""Texts that begin alike and come at the same time: one is read, the others take its blocks; if it ends, the next is read."""

import pytest
from asking import Client, build, prompts

from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.cache_groups import Group
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.request import Request
from lowq_cli.serving.scheduler import Scheduler
from lowq_cli.serving.sequence import Sequence

COMMON, OWN, USERS = 4000, 50, 16
SHARED = COMMON // BLOCK * BLOCK
KINDS = {
    "all tokens": [Group()],
    "a window": [Group(), Group(300)],
    "recurrent": [Group(), Group(recurrent=True)],
}


class Reading:
    """A scheduler, texts that begin alike, and the prompt tokens that it reads of each."""

    def __init__(self, groups, piece=512, first=()):
        slots = 64 if any(g.recurrent for g in groups) else 0
        paged = [6000] * sum(not g.recurrent for g in groups)
        self.scheduler = Scheduler(CacheManager(groups, paged, BLOCK, piece, slots, slots), 64, lambda n: n)
        self.piece, self.read, self.texts = piece, {}, {}
        start = [i % 97 for i in range(COMMON)]
        for n in range(USERS):
            self.add([*start, *([1000 + n] * OWN)])

    def add(self, prompt):
        seq = self.texts[len(self.texts)] = Sequence(len(self.texts), Request(tuple(prompt), 5))
        self.scheduler.add([seq])
        return seq

    def turn(self):
        plan = self.scheduler.plan(lambda high, waiting: self.piece)
        for seq, _, first, end in plan.pieces:
            self.read[seq.number] = self.read.get(seq.number, 0) + end - first
        for seq in [*plan.steps, *plan.finishing]:
            if self.scheduler.on_token(seq, 7):
                self.scheduler.end(seq)
        return plan

    def finish(self):
        for _ in range(500):
            if not (self.scheduler.waiting or self.scheduler.active):
                return
            self.turn()
        raise AssertionError("somebody waits for ever")


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_beginning_of_sixteen_prompts_is_read_once(kind):
    load = Reading(KINDS[kind])
    while load.texts[0] in load.scheduler.reading or not load.read:
        load.turn()
        assert load.read.keys() == {0} or load.read[0] >= SHARED
    load.finish()
    assert sorted(load.read.values()) == [*[COMMON + OWN - SHARED] * (USERS - 1), COMMON + OWN]
    assert load.scheduler.prefix_hits == SHARED * (USERS - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_one_that_is_read_ends_another_goes_on(kind):
    load = Reading(KINDS[kind])
    for number in range(3):  # whichever is read is cancelled after two passes
        load.turn()
        load.turn()
        (reader,) = load.scheduler.reading
        assert reader.number == number
        load.scheduler.end(reader)
    load.finish()
    left = {n: k for n, k in load.read.items() if n > 2}
    assert len(left) == USERS - 3
    if kind == "recurrent":  # a state is there again only where a snapshot was taken
        assert sum(k > OWN + BLOCK for k in left.values()) == 1
    else:
        assert load.read[0] + load.read[1] + load.read[2] + left[3] == COMMON + OWN
        assert sum(left.values()) - left[3] == (USERS - 4) * (COMMON + OWN - SHARED)


def test_no_request_waits_for_a_later_one():
    """A question of 100 tokens is not read after a document of 9,000 that begins with the same block."""
    load = Reading([Group()])
    for seq in list(load.texts.values()):
        load.scheduler.end(seq)
    load.add([5] * 9000)
    load.turn()  # of others, too: the document is not through for long
    short = load.add([6] * 64 + [8] * 36)
    like = load.add([5] * 64 + [9] * 36)
    plan = load.turn()
    assert {short.number, like.number} <= {t.number for t in plan.finishing}  # its first block is read already
    document = load.add([3] * 9000)
    for n in range(10, 30):
        load.add([n] * 400)
    load.turn()
    early = load.add([3] * 64 + [9] * 36)
    while not document.computed and load.scheduler.reading:
        assert early.number not in load.read
        if early.number in {t.number for t in load.turn().finishing}:
            break
    assert document.computed == 0  # the short one did not wait for it


def test_answers_are_those_of_each_alone():
    model = build("llama")
    start, own = prompts(300)[0], prompts(*range(3, 15), seed=5)
    alone = Client(model, running=1)
    try:
        expected = [alone.tokens(alone.ask([*start, *p]))[0] for p in own]
    finally:
        alone.engine.stop(0)
    client = Client(model, running=6)
    try:
        numbers = [client.ask([*start, *p]) for p in own]
        client.engine.cancel(numbers[0])  # the one whose blocks the others wait for
        response = client.tokens(*numbers[1:])
        assert response == expected[1:]
        assert client.engine.stats().prefix_hits >= (len(own) - 2) * (300 // BLOCK * BLOCK)
    finally:
        client.engine.stop(0)
