"""State by kind of layer: pages of all tokens, of a window, recurrent states; whatever comes, goes, is put back or drafted."""

import gc
import random
import sys
from collections import Counter, deque
from itertools import count

import pytest
from simulated_device import SIZE, Driver, Truth, V, driver

from lowq_cli.serving.cache_groups import REWIND, Group
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.request import Request
from lowq_cli.serving.scheduler import Scheduler
from lowq_cli.serving.sequence import Sequence


@pytest.mark.parametrize("seed", range(2))
def test_each_sequence_reads_its_own_blocks_and_no_block_is_lost(seed):
    seen, scheduled = Counter(), Counter()
    for n in range(24):
        d = driver(1000 * seed + n)
        for turn in range(160):
            for _ in range(d.rng.choice([0, 0, 0, 1, 2])):
                d.submit()
            if d.rng.random() < 0.06:
                d.cancel()
            d.turn()
            if turn % 3 == 0:
                d.check()
        d.empty()
        seen += d.seen
        scheduled.update(preemptions=d.scheduler.preemptions, prefix_hits=d.scheduler.prefix_hits)
    for name in ("moves", "zero", "copies", "snapshots", "given back", "drafts", "rewound", "cancelled", "out", "in"):
        assert seen[name] > 5, name
    assert scheduled["preemptions"] > 5
    assert scheduled["prefix_hits"] > 1000


def reading(groups, blocks, prompt, budget, snapshots=0, piece=64):
    """A driver with one text of this prompt, read to its end; its pieces, and the most blocks it held in each page group."""
    d = Driver(random.Random(0), groups, blocks, 2, snapshots, piece=piece, ahead=0)
    return d, *follow(d, prompt, budget)


def follow(d, prompt, budget, new=1):
    """One more text, alone: its pieces, and the most blocks it held in each page group; it is over in the end."""
    seq = Sequence(next(d.numbers), Request(tuple(prompt), new))
    d.texts[seq.number], d.truths[seq.number] = seq, Truth(prompt)
    d.scheduler.waiting.append(seq)
    d.budget, run, pieces, held = lambda high, waiting: budget, d.run, [], [0] * len(d.cache.pages)

    def noted(plan, drafts):
        pieces.extend((first, end) for _, _, first, end in plan.pieces)
        held[:] = [max(h, sum(map(bool, t.blocks))) for h, t in zip(held, seq.tables, strict=True)]
        run(plan, drafts)

    d.run = noted
    while not seq.done:
        d.turn()
    d.run = run
    d.check()
    return pieces, held


def test_a_window_holds_as_many_blocks_as_it_and_a_piece_cover_and_no_more():
    prompt = [i % V for i in range(300)]
    for window in (1, 2, 16, 33, 100):
        for piece in (1, 20, 64):
            groups = [Group(), Group(window)]
            _, pieces, held = reading(groups, [40, 40], prompt, piece, piece=piece)
            assert pieces[-1][1] == 300
            most = groups[1].blocks(300, SIZE, piece)
            assert held == [19, most] if piece > 1 else held[1] <= most
            assert most <= -(-(window + piece) // SIZE) + 2
    assert Group(1024).blocks(32768, 64, 4096) == 82
    assert Group(1024).blocks(32768, 64) == 18
    assert Group().blocks(32768, 64) == 512
    assert Group(recurrent=True).blocks(32768, 64) == 0


def test_a_small_pool_of_a_window_takes_texts_longer_than_itself():
    group, prompt = Group(33), [i % V for i in range(300)]
    least = group.blocks(320, SIZE)
    assert group.longest(least + 1, SIZE, 320) == 320
    assert group.longest(least, SIZE, 320) == (least - 1) * SIZE
    assert Group().longest(9, SIZE, 320) == 8 * SIZE
    d, pieces, held = reading([group], [least + 1], prompt, 64)
    assert pieces[-1][1] == 300
    assert held == [least]
    assert d.scheduler.preemptions == 0


def test_a_beginning_of_a_window_is_found_without_the_blocks_before_it():
    prompt = [i * i % V for i in range(200)]
    d, *_ = reading([Group(20)], [9], prompt, 64)
    pool = d.cache.pages[0].pool
    names = d.cache.name_of
    seq = Sequence(99, Request(tuple(prompt), 1))
    d.truths[99] = Truth(prompt)
    assert not pool.find(names(seq, 1))  # reused long ago
    match = d.cache.match(seq)
    assert match.tokens == 192
    assert [bool(b) for b in match.blocks[0]] == [False] * 10 + [True] * 2
    assert follow(d, prompt, 64)[0] == [(192, 200)]


def test_a_recurrent_text_goes_on_from_the_last_block_of_its_prompt():
    groups, prompt = [Group(), Group(recurrent=True)], [i * i % V for i in range(90)]
    d, pieces, _ = reading(groups, [40], prompt, 64, snapshots=6)
    assert pieces == [(0, 64), (64, 80), (80, 90)]  # cut at the last block's end
    assert follow(d, prompt, 64)[0] == [(80, 90)]
    assert follow(d, [*prompt[:80], 1, 2], 64)[0] == [(80, 82)]
    assert follow(d, [*prompt[:40], 2, 2, 2, 2, 2, 2, 2, 2, 2], 64)[0][0] == (0, 32)  # parts from it: a snapshot for the next
    assert follow(d, [*prompt[:40], 1, 1, 1, 1, 1, 1, 1, 1, 1], 64)[0][0][0] == 32
    assert follow(d, prompt[:9], 64)[0] == [(0, 9)]  # shorter than a block
    assert follow(d, [*[2] * 48], 64)[0] == [(0, 32), (32, 48)]  # one token at least is left to compute
    assert follow(d, [*[2] * 48], 64)[0] == [(32, 48)]
    none, pieces, _ = reading(groups, [40], prompt, 64, snapshots=0)
    assert pieces == [(0, 64), (64, 90)]
    assert follow(none, prompt, 64)[0] == [(0, 64), (64, 90)]


def test_a_running_text_keeps_one_snapshot_of_many():
    groups, prompt = [Group(), Group(recurrent=True)], [1] * 20
    d, *_ = reading(groups, [40], [2] * 40, 64, snapshots=3)  # another text's: at 32
    truth = Truth(prompt)
    while len(truth.tokens) < 260:
        truth.add(truth.next)
    follow(d, prompt, 64, new=240)
    assert d.seen["snapshots"] == 2 + 4  # at 64, 128, 192 and 256
    assert follow(d, [*truth.tokens[:258], 0], 64)[0] == [(256, 259)]
    assert follow(d, [2] * 40, 64)[0] == [(32, 40)]  # a long answer left it alone


def steps_of(groups, snapshots=40):
    """A driver whose one text has its prompt computed, and runs."""
    blocks = [40 for g in groups if not g.recurrent]
    d = Driver(random.Random(1), groups, blocks, 1, snapshots, piece=400, ahead=0)
    seq = d.texts[1] = Sequence(1, Request(tuple([1] * 100), 100))
    d.truths[1] = Truth(seq.tokens)
    d.scheduler.waiting.append(seq)
    while not seq.ahead and len(seq.tokens) == 100:
        d.turn()
    return d, seq


GROUPS = [[Group()], [Group(), Group(20)], [Group(1)], [Group(40), Group(recurrent=True)]]


@pytest.mark.parametrize("groups", GROUPS, ids=range(len(GROUPS)))
def test_a_draft_can_be_taken_back_by_any_number_of_rows(groups):
    for n in range(1, REWIND + 1):
        for right in range(n + 1):
            d, seq = steps_of(groups)
            plan = d.scheduler.plan(lambda high, waiting: 400)
            base = seq.computed - 1
            slots = d.scheduler.draft(plan, seq, n)
            assert len(slots) == (n if seq.slot else 0)
            assert d.scheduler.plan(lambda high, waiting: 400).steps == []  # it waits for the outcome
            d.scheduler.rewind(seq, base + 1 + right)
            for _ in range(right + 1):
                assert d.scheduler.on_token(seq, 1) is None
            assert (seq.computed, seq.ahead) == (len(seq.tokens) - 1, 0)
            assert all(len(t.blocks) == -(-seq.computed // SIZE) for t in seq.tables)
            copies = d.scheduler.plan(lambda high, waiting: 400).copies
            assert copies == ([(slots[right], seq.slot)] if slots and right < n else [])
            d.scheduler.end(seq)
            assert d.cache.used == 0


def test_more_than_a_draft_is_not_taken_back():
    d, seq = steps_of([Group(20), Group(recurrent=True)], snapshots=3)
    plan = d.scheduler.plan(lambda high, waiting: 400)
    assert d.scheduler.draft(plan, seq, REWIND + 1) is None
    assert d.scheduler.draft(plan, seq, 4) is None  # three slots
    slots = d.scheduler.draft(plan, seq, 2)
    before = [list(t.blocks) for t in seq.tables], seq.computed, seq.ahead
    for length in (seq.computed + 1, len(seq.tokens) - 1, 0):
        with pytest.raises(ValueError, match="known and"):
            d.scheduler.rewind(seq, length)
    seq.drafts.pop(0)
    with pytest.raises(ValueError, match="more than a draft"):
        d.scheduler.rewind(seq, len(seq.tokens))
    assert before == ([list(t.blocks) for t in seq.tables], seq.computed, seq.ahead)
    assert len(slots) == 2


def test_deterministic_pieces_are_those_of_a_text_alone():
    rng = random.Random(5)
    for groups, blocks in (([Group(), Group(30)], [60, 12]), ([Group(50)], [20]), ([Group(), Group(recurrent=True)], [24])):
        d = Driver(rng, groups, blocks, 5, 8, fixed=True, piece=48)
        run = d.run

        def cut(plan, drafts, d=d, run=run):
            for seq, _, first, end in plan.pieces:
                assert (first % 48, end) == (0, min(first + 48, len(seq.tokens)))
            assert not (plan.pieces and plan.steps)
            run(plan, drafts)

        d.run = cut
        for turn in range(400):
            if turn % 4 == 0:
                d.submit()
            d.turn()
            d.check()
        d.empty()
        assert all(not g.pool.names for g in d.cache.pages)
        assert d.seen["copies"] == d.seen["snapshots"] == 0
        assert d.scheduler.preemptions > 0 or blocks != [24]


def test_memory_stays_flat():
    """The records of 16,000 passes are as large as those of the first 4,000: blocks, slots and texts that there are."""
    groups = [Group(), Group(30), Group(recurrent=True)]
    cache = CacheManager(groups, [60, 40], SIZE, 64, 6, 12)
    scheduler, rng, numbers, flights = Scheduler(cache, 6, lambda n: n), random.Random(2), count(1), deque()
    sizes = []
    for turn in range(16_000):
        if len(scheduler.waiting) < 3 and rng.random() < 0.4:
            prompt = [rng.randrange(2)] * rng.randrange(1, 80) + [rng.randrange(V) for _ in range(rng.randrange(1, 40))]
            scheduler.waiting.append(Sequence(next(numbers), Request(tuple(prompt), rng.randrange(1, 40))))
        if rng.random() < 0.02 and scheduler.active:
            scheduler.end(rng.choice(scheduler.active))
        plan = scheduler.plan(lambda high, waiting: 64)
        if plan is not None:
            flights.append([*plan.steps, *plan.finishing])
        while len(flights) > (plan is not None):
            for seq in flights.popleft():
                if not seq.done and scheduler.on_token(seq, rng.randrange(V)):
                    scheduler.end(seq)
        if turn in (4_000, 15_999):
            gc.collect()
            sizes.append(sys.getallocatedblocks())
    assert next(numbers) > 1_600
    assert sizes[1] < sizes[0] + 1900


@pytest.mark.parametrize("window", [1, 2, 16, 33, 100])
def test_blocks_freed_behind_a_window_are_not_needed_after_a_rewind(window):
    for computed in range(1, 200, 3):
        for back in range(min(REWIND, computed - 1) + 1):
            cache = CacheManager([Group(window)], [60], SIZE, 300, shared=False)
            seq = Sequence(1, Request((1,) * computed, 20))
            cache.admit(seq, cache.match(seq))
            seq.computed = computed
            cache.trim(seq)
            cache.rewind(seq, computed - back)
            seen = range(max(0, computed - back - window + 1), computed - back)  # by the token that is computed next
            assert all(seq.tables[0].blocks[token // SIZE] for token in seen)
    with pytest.raises(ValueError, match="more than a draft"):
        cache.rewind(seq, 0)
