"""How long passes may take: a bound on every wait, whatever comes, and prompts that are read as fast as they come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowq_cli.engine.state import BLOCK
from lowq_cli.serving.cache_groups import Group
from lowq_cli.serving.cache_manager import CacheManager
from lowq_cli.serving.pass_sizes import TOTALS, PassSizes
from lowq_cli.serving.request import Limits, Request
from lowq_cli.serving.scheduler import Scheduler
from lowq_cli.serving.sequence import Sequence
from lowq_cli.serving.token_budget import ALONE_S, FIRST, LONGEST_S, PAUSE_S, PREFER, SLACK, TokenBudget

ROWS = 16
TOKEN_S = 20e-6  # of a row of a pass
LEAST_S = 3e-3  # min. seconds of any pass


def seconds(rows):
    return LEAST_S + TOKEN_S * rows


class Engine:
    """The engine's decisions over a device whose passes take what `seconds` says."""

    def __init__(self, prefer=PREFER[0], drafted=False):
        self.drafted = drafted  # whether all passes without prompt tokens check drafts
        self.sizes, self.budget = PassSizes(ROWS), TokenBudget(TOTALS, prefer)
        for rows in self.sizes.steps:
            self.budget.note(rows, rows, seconds(rows))
        for steps in {0, *map(self.sizes.riding, self.sizes.steps)}:
            for rows in TOTALS:
                self.budget.note(steps, rows, seconds(rows))
        self.scheduler = Scheduler(CacheManager([Group()], [4000], BLOCK, TOTALS[-1]), ROWS, self.sizes.bucket)
        self.now, self.read, self.number = 0.0, 0, 0
        self.admissions = []
        self.admitted, self.waits, self.last, self.lengths, self.firsts, self.came = {}, [], {}, [], [], {}

    def add(self, prompt, answer):
        self.number += 1
        self.came[self.number] = self.now
        self.scheduler.add([Sequence(self.number, Request((self.number,) * prompt, answer))])
        return self.number

    def turn(self):
        """One pass, seen at once."""
        s, riding, budget = self.scheduler, self.sizes.riding, self.budget
        before = {t.number: len(t.tokens) - t.computed for t in s.reading}
        plan = s.plan(
            lambda *a: budget.prompt_tokens(*s.load(*a, riding(a[0]))),
            lambda *a: budget.pauses(*s.load(*a, riding(a[0]))),
        )
        for text in {*(t for t, *_ in plan.pieces), *s.reading}:  # also again, after it gave way to another
            if text.number not in before:
                self.admitted[text.number] = self.read, sum(before.values()), len(text.tokens)
                self.admissions.append((self.read, len(text.tokens)))
        size = self.sizes.size(max((t.row + 1 for t in plan.steps), default=0), sum(b - a for *_, a, b in plan.pieces))
        self.now += seconds(size[1])
        self.read += sum(end - first for *_, first, end in plan.pieces)
        if self.drafted and not plan.pieces:
            self.budget.drafted(seconds(size[1]))
        else:
            self.budget.note(*size, seconds(size[1]))
        self.budget.stepped(len(plan.steps))
        self.lengths.append(self.budget.length)
        for text in [*plan.steps, *plan.finishing]:
            if text not in plan.finishing:
                self.waits.append(self.now - self.last[text.number])
            elif text.number not in self.last:  # else it gave way to another
                self.firsts.append(self.now - self.came[text.number])
            self.last[text.number] = self.now
            if s.on_token(text, 7):
                s.end(text)
        return plan

    @property
    def open(self):
        return bool(self.scheduler.waiting or self.scheduler.active)


ARRIVALS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 30, 400, 3000, 9000]), st.integers(1, 40)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, prefer=st.sampled_from(PREFER))
def test_every_prompt_and_every_token_has_a_bound_for_any_arrivals(arrivals, prefer):
    """A prompt is overtaken only by one that comes before as many tokens were read as it is shorter; no stream stalls.

    Its turn begins and ends inside a pass, so the tokens of two passes come on top.
    """
    engine, turn, coming = Engine(prefer), 0, sorted(arrivals, reverse=True)
    while coming or engine.open:
        while coming and coming[-1][0] <= turn:
            engine.add(*coming.pop()[1:])
        plan, turn = engine.turn(), turn + 1
        for text in plan.finishing:
            read, before, own = engine.admitted[text.number]
            overtaking = sum(theirs for at, theirs in engine.admissions if read <= at and at + theirs <= read + own)
            assert engine.read - read <= before + overtaking + 2 * TOTALS[-1]
        assert turn < 4000, "somebody starves"
    longest = max(LONGEST_S, SLACK * seconds(ROWS)) + TOKEN_S * 256  # passes come in sizes
    assert all(wait <= PAUSE_S + longest for wait in engine.waits)
    assert not engine.scheduler.cache.used


def steady(prompt, every, prefer=PREFER[0], turns=1500, drafted=False):
    """Texts of 100 tokens, one with such a prompt after every so many seconds; passes and waits of the second half."""
    engine, due = Engine(prefer, drafted), 0.0
    for i in range(turns):
        while engine.now >= due:
            engine.add(prompt, 100)
            due += every
        engine.turn()
        if i == turns // 2:
            engine.waits.clear()
            engine.lengths.clear()
            engine.firsts.clear()
    return engine


def test_passes_grow_until_prompts_are_read_as_fast_as_they_come():
    """3,000 tokens, 60 ms to read, every 85 ms: more than a pass of SLACK steps carries."""
    calm, busy = steady(100, 0.085), steady(3000, 0.085)
    assert max(calm.lengths) <= SLACK * seconds(ROWS) < max(busy.lengths)
    assert len(busy.scheduler.waiting) + len(busy.scheduler.reading) <= 3
    waits = sorted(busy.waits)
    assert waits[int(0.99 * len(waits))] < 3 * waits[len(waits) // 2]


def test_a_pass_carries_no_fewer_tokens_where_attention_takes_less():
    """The time of a step is uncertain while prompts are in every pass: that it falls must not slow down reading."""
    budget = steady(3000, 0.085, turns=600).budget
    budget.extra = 0.004
    before = budget.prompt_tokens(ROWS, ROWS, 9000, ROWS, ROWS)
    budget.extra = 0.0
    assert budget.prompt_tokens(ROWS, ROWS, 9000, ROWS, ROWS) >= before


def latencies(engine):
    """Mean seconds to the first token, and the p99 wait for a later one over the median wait."""
    waits = sorted(engine.waits)
    return sum(engine.firsts) / len(engine.firsts), waits[int(0.99 * len(waits))] / waits[len(waits) // 2]


def test_prefer_first_token_gives_earlier_first_tokens_and_uneven_streams():
    first, tail = zip(*(latencies(steady(3000, 0.1, prefer)) for prefer in ("balanced", "first-token")), strict=True)
    assert first[1] < 0.8 * first[0]
    assert tail[0] < 3 < tail[1]


def test_prefer_smooth_spreads_prompts_over_all_passes():
    """3,000 tokens every 85 ms: with `balanced`, which reads them as fast, the p99 wait is 1.8 times the median."""
    engine = steady(3000, 0.085, "smooth")
    assert latencies(engine)[1] < 1.5
    assert len(engine.scheduler.waiting) + len(engine.scheduler.reading) <= 3


def test_what_the_passes_of_a_former_load_took_is_forgotten():
    """Also where no plain step comes between passes with prompt tokens; their pieces would stay small."""
    budget = TokenBudget((256, 4096))
    for steps, rows in ((16, 16), (16, 256), (16, 4096)):
        budget.note(steps, rows, seconds(rows))
    for _ in range(20):
        budget.note(16, 16, seconds(16))
        budget.note(16, 4096, seconds(4096) + 0.016)
    assert budget.seconds(16, 256) > seconds(256) + 0.01
    budget.note(16, 256, seconds(256))
    assert budget.seconds(16, 256) < seconds(256) + 0.001


def known(prefer=PREFER[0]):
    """A TokenBudget that knows all passes, in which no long pass is due."""
    budget = TokenBudget(TOTALS, prefer)
    for steps, rows in ((ROWS, ROWS), *((ROWS, rows) for rows in TOTALS)):
        budget.note(steps, rows, seconds(rows))
    budget.begin()
    budget.late = 1000.0
    return budget


@pytest.mark.parametrize(("prefer", "longest"), [("balanced", 0.01), ("smooth", 0.008)])
def test_passes_are_longer_while_several_prompts_wait(prefer, longest):
    budget, lengths = known(prefer), []
    budget.usual, budget.crowded = 0.008, 0.01
    for waiting in (3000, 60_000):
        budget.prompt_tokens(ROWS, ROWS, waiting, ROWS, ROWS)
        lengths.append(budget.length)
    assert lengths == pytest.approx([SLACK * 0.008, SLACK * longest])


@pytest.mark.parametrize("every", [0.08, 0.11, 0.12, 0.13, 0.15, 0.2])
def test_no_token_comes_much_later_than_the_median_however_often_prompts_come(every):
    """From more than passes of SLACK steps carry to few: the bound must not change which wait is the median."""
    assert latencies(steady(3000, every))[1] < 3


def test_passes_with_drafts_end_a_wait_as_steps_do():
    """Else only passes with prompt tokens would count as waits, and those would grow to LONGEST_S."""
    assert steady(3000, 0.2, drafted=True).waits == steady(3000, 0.2).waits


def test_passes_reach_the_length_that_a_burst_needs_within_the_burst():
    """120,000 tokens wait: `usual` is three times as long after 50 passes, with 3,000 waiting after more than 100."""
    passes = {}
    for waiting in (3000, 120_000):
        budget = known()
        budget.usual = budget.crowded = 0.005
        for n in range(400):
            budget.prompt_tokens(ROWS, ROWS, waiting, ROWS, ROWS)
            budget.stepped(ROWS)
            budget.note(ROWS, 2048, seconds(2048))
            if budget.usual > 0.015:
                passes[waiting] = n
                break
    assert passes[120_000] < 50 < 100 < passes[3000]


def test_a_server_that_was_idle_begins_with_the_wait_for_a_step():
    """Documents leave a wait of several steps; once their users have left, new requests would wait for passes as long."""
    engine = steady(3000, 0.085, turns=600)
    budget, scheduler = engine.budget, engine.scheduler
    busy = budget.usual
    for text in [*scheduler.active, *scheduler.waiting]:
        scheduler.end(text)
    engine.add(100, 3)
    engine.turn()
    assert budget.usual < 1.2 * budget.seconds(ROWS, ROWS) < busy


def test_texts_wait_once_while_a_burst_is_read():
    """Twelve prompts of 3,000 at once: passes of prompts alone, then a step; fewer waits than passes."""
    engine = Engine()
    engine.add(10, 400)
    for _ in range(5):
        engine.turn()
    for _ in range(12):
        engine.add(3000, 50)
    plans, began = [], engine.now
    while engine.scheduler.reading or engine.scheduler.waiting:
        plans.append(engine.turn())
    alone = [not p.steps for p in plans]
    assert alone[:4] == [True] * 4
    assert not all(alone)
    assert engine.now - began < 12 * seconds(3000) * 1.25  # 1.6 in passes of SLACK steps
    assert max(engine.waits) == pytest.approx(PAUSE_S, rel=0.35)


@pytest.mark.parametrize("token_s", [2e-5, 3e-3, 0.04, 2.0])
def test_a_prompt_alone_is_read_in_passes_that_a_hung_device_is_not_taken_for(token_s):
    """The first pass is small, and those after it take as many tokens as their expected time allows."""
    budget, left, taken = TokenBudget(TOTALS), 20_000, []
    while left:
        taken.append(budget.prompt_tokens(1, 0, left, 0, 1))
        budget.note(0, taken[-1], token_s * taken[-1])
        left -= taken[-1]
    assert taken[0] == FIRST
    assert taken[1] == max([TOTALS[0]] + [t for t in TOTALS if token_s * t <= ALONE_S])
    expected = [budget.seconds(0, n) for n in taken[1:]]
    assert max(expected) <= max(ALONE_S, token_s * TOTALS[0])
    assert Limits(1, 1, 1, 1, 1).stuck_s > 2 * ALONE_S


def test_the_first_pass_of_a_burst_reads_prompts_however_many_texts_wait():
    """The rows kept for their later steps are not taken from a first pass, whose time is not known."""
    for riding in (0, 1, 256, 512):
        assert TokenBudget(TOTALS).prompt_tokens(riding, riding, 20_000, 0, max(1, riding)) == FIRST
