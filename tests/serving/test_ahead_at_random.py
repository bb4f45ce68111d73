"""Requests drawn at random, with a drafter whose guesses stay on the device and passes launched ahead of their results.

Costs change from pass to pass, so that guesses, n-grams and plain passes alternate; the cache is too small for all, requests
are cancelled, share beginnings, have adapters, masks and penalties, and prompts come in passes without steps. Each answer is
the one of the same engine without drafts. Each pass is checked as it is launched, too: the device has the blocks of each
sequence and no others, and no request that is drawn on the host checks a guess that the host has not read. A draft model that
is the model itself is right with every guess that follows a text's likeliest tokens.
"""

import random
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from asking import Client, Free, Replayed, adapter
from test_device_drafts import STOPS, Believed, Recording, Trusting, made, prompts
from transformers import AutoModelForCausalLM

from lowq_cli.engine.drafts.drafter import GUESSED
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.engine.drafts.rates import BEFORE
from lowq_cli.engine.lora import adapt
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.state import BLOCK
from lowq_cli.files.adapter import read_adapter
from lowq_cli.serving import cache_allocator, model_runner
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.host_memory import HostMemory
from lowq_cli.serving.pass_sizes import PassSizes
from lowq_cli.serving.request import Draw, Mask, Request, allow

KINDS = ("itself", "EAGLE-3", "another model", "MTP of glm4_moe", "DFlash", "P-EAGLE")
REQUESTS = 24  # of each seed


class Thirds(Mask):
    """Allows, after each token, two thirds of the others; which ones depends on the token. Draft tokens are at least 0."""

    takes_drafts = True

    def __init__(self, last, vocabulary):
        self.last, self.vocabulary = last, vocabulary

    def fill(self, words):
        self._fill(words, self.last)

    def fill_drafts(self, words, drafts):
        self._fill(words[0], self.last)
        before = self.last
        for i, token in enumerate(drafts):
            assert token >= 0
            if not self._allows(before, token):
                return i
            self._fill(words[i + 1], token)
            before = token
        return len(drafts)

    def accept(self, token):
        assert self._allows(self.last, token)
        self.last = token

    def _fill(self, words, last):
        words[:] = 0
        for token in range(3, self.vocabulary):
            if self._allows(last, token):
                allow(words, token)

    @staticmethod
    def _allows(last, token):
        return (7 * token + last) % 3 > 0


def drawn(rng, begin, vocabulary):
    """A function that makes a request, as a mask belongs to one request."""
    piece = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 24))]
    start = begin[: rng.randint(1, len(begin))]
    prompt = rng.choice([start + piece, piece * rng.randint(2, 7), start, start])
    n = rng.choice([1, 2, 3, 3, 12, 40, 90])
    draw = Draw(temperature=rng.choice([0, 0, 0, 0, 0, 0.7]), seed=rng.randrange(100))
    if rng.random() < 0.3:
        how = {
            "top_p": rng.choice([1, 0.8]), "logit_bias": rng.choice([{}, {70: 4.0, 80: -100.0}]),
            "presence_penalty": rng.choice([0, 1.5]), "repetition_penalty": rng.choice([1, 1.3]),
            "logprobs": rng.choice([None, 0, 3]),
        }  # fmt: skip
        draw = Draw(temperature=draw.temperature, seed=draw.seed, **how)
    masked, which = rng.random() < 0.2, rng.choice([0, 0, 0, 1, 2])
    stops = rng.choice([frozenset(), frozenset(STOPS), frozenset(rng.sample(range(vocabulary), 2))])

    def make():
        mask = Thirds(prompt[-1], vocabulary) if masked else None
        return Request(tuple(prompt), n, stops, draw, mask=mask, adapter=which)

    return make


class Moody(Free):
    """Costs that change from pass to pass."""

    def __init__(self, costs, rng):
        super().__init__(costs)
        self.rng = rng

    def plain_s(self, texts):
        return 1.0

    def pass_s(self, rows, texts, plain_s):
        return plain_s * (1 + self.mood * (rows / texts - 1))

    def guess_s(self, plain_s):
        return plain_s * self.mood / 4

    @property
    def mood(self):
        return self.rng.choice([0.0, 0.01, 0.05, 0.2, 1.0])

    @property
    def gap_s(self):
        return self.rng.choice([0.0, 0.0, 0.1, 5.0])

    @gap_s.setter
    def gap_s(self, seconds):
        pass

    late_s = gap_s


@contextmanager
def as_on_a_gpu(yes):
    """Engines made here have passes of few sizes, whose other rows only fill them up, and rows that the host writes before a
    pass alone."""

    def sizes(most, padded, *how):
        result = PassSizes(most, padded or yes, *how)
        result.totals = (32, 64, 128, 256, 512) if yes else result.totals
        return result

    rows = partial(BatchState, separate=yes)
    with patch.object(model_runner, "PassSizes", sizes), patch.object(cache_allocator, "BatchState", rows):
        yield


def record(engine):
    """Record the engine's passes when they come again, and what its drafter computes after them; also while it is idle."""
    passes, drafts = engine.passes, engine.drafts
    passes.met, passes.pool = set(), object()
    passes.capture = lambda step, pool: Replayed(step, passes.rows)
    passes.record_next = drafts.passes.record_next = lambda: False  # a CPU's recordings are not timed
    drafts.passes.record_when_met({})
    drafts.guesses.record(Recording(), drafts.passes.sizes, passes.sizes.totals, passes.sizes.most)
    width = passes.plan.embed(torch.zeros(1, dtype=torch.int64)).shape[1]
    hidden = {i: torch.ones(drafts.passes.sizes[-1], width) for i in (*drafts.guesses.drafter.layers, -1)}
    drafts._left = (one for _ in range(1000) for one in drafts.guesses.combinations(hidden))
    engine._unrecorded = True


def moody(engine, rng, follows):
    """The engine with passes launched ahead, and with drafts decided by costs that change. follows: whether the drafter goes on
    reading while drafts do not pay."""
    engine.pipeline.ahead, drafts, left = 1, engine.drafts, [True, 0]
    drafts.go_ahead()
    assert drafts.ahead
    drafts.costs = Moody(drafts.costs, rng)

    def allows(size):
        left[1] -= 1
        if left[1] < 0:
            left[:] = rng.random() < 0.8, rng.randint(1, 40)
        return left[0]

    waits = lambda size: not follows and rng.random() < 0.5  # noqa: E731
    none = {"plain_s": lambda size: 0.0, "passed": lambda *how: None, "interrupted": int}
    drafts._trials = SimpleNamespace(allows=allows, waits=waits, **none)
    drafts._latest = lambda texts: rng.choice([None, {t.number: rng.choice([0.5, 1.0, 2.0, 9.0]) for t in texts}])
    if rng.random() < 0.5:
        believed = Believed([BEFORE] * drafts.guesses.drafter.most)
        drafts.drafter = lambda: Trusting(believed, NGram(drafts._answers))


def paused(engine, rng):
    """The engine with prompts read in pieces of random lengths, some of them in passes without steps."""
    engine._pauses = lambda high, waiting: rng.random() < 0.4
    engine._budget = lambda high, waiting: min(waiting, rng.choice([1, 7, 64, 300]))


def checked(engine):
    """The engine with a check of each pass. Returns a list of what is wrong, and one of (sequence, number of tokens, guesses
    after them)."""
    wrong, made, tables, drafts, rows = [], [], [], engine.drafts, engine.passes.rows
    launch, guessing, guess = engine.pipeline.launch, drafts._guessing, drafts.guesses._guesses

    def look(what, text, there):
        held = text.tables[0].blocks
        if there[: len(held)] != held or any(there[len(held) :]):
            wrong.append(f"{what} text {text.number}, which holds {held}: {there}")

    def launched(plan, checks):
        for text in plan.steps:
            look("blocks of", text, rows.tables[0][text.row].tolist())
            tokens, _ = checks.get(text.number, ([], []))
            if text.request.special and GUESSED in tokens:
                wrong.append(f"text {text.number} is drawn on the host and checks {tokens}")
        return launch(plan, checks)

    def guessed(of, *how):
        tables[:] = [rows.tables[0][one.table].tolist() for one in of]
        return guess(of, *how)

    def kept(texts, flight, guesses):
        for text, there, tokens in zip(texts, tables, guesses.tolist(), strict=True) if guesses is not None else ():
            look("blocks of guesses after", text, there)
            made.append((text, int(rows.pos[text.row]) + 1, tokens))
        guessing(texts, flight, guesses)

    engine.pipeline.launch, drafts._guessing, drafts.guesses._guesses = launched, kept, guessed
    return wrong, made


def answers(client, requests, rng=None):
    """[[(token, log-probabilities)]] of requests; with rng, some of them come later, and some are cancelled."""
    numbers, left = list[int](), list(requests)

    def ended(number):
        return number in client.heard and client.heard[number][-1].finish_reason

    while left or not all(map(ended, numbers)):
        n = rng.randint(all(map(ended, numbers)), 5) if rng else len(left)
        numbers += [client.engine.submit(make()) for make in left[:n]]
        del left[:n]
        client.hear()
        if rng and rng.random() < 0.01:
            client.engine.cancel(rng.choice(numbers))
    heard = [client.heard[n] for n in numbers]
    return [([(e.token, e.logprob, e.top) for e in events if e.token is not None], events[-1]) for events in heard]


@pytest.fixture(scope="module", params=[KINDS[0], *(pytest.param(kind, marks=pytest.mark.more) for kind in KINDS[1:])])
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kind")
    model, drafter = made(request.param, folder)
    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapt(plan_of(model), [read_adapter(adapter(folder / n, whole, i), n) for i, n in enumerate("ab")])
    return model, drafter


def likeliest(request):
    """Whether the tokens of a request are the likeliest ones of the model without adapters."""
    return not (request.special or request.draw.temperature or request.adapter)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.more) for seed in (0, 2, 3, 4, 5))])
def test_each_answer_is_that_without_drafts(both, seed):
    model, drafter = both
    rng, moods, vocabulary = random.Random(seed), random.Random(seed), plan_of(model).vocabulary
    begin = prompts(200, seed=seed)[0]
    requests = [drawn(rng, begin, vocabulary) for _ in range(REQUESTS)]
    plain = Client(model, running=12)
    expected = answers(plain, requests)
    plain.engine.stop(0)
    on_gpu, follows, memory = bool(seed % 2), seed % 4 < 2, HostMemory(4 << 20, 1)
    how = {"running": rng.choice([1, 2, 4, 6, 9]), "cache_tokens": rng.choice([384, 512, 640, 2048])}
    with as_on_a_gpu(on_gpu):
        c = Client(model, draft=drafter, **how | ({"host": memory.lend("m")} if rng.random() < 0.5 else {}))
    if on_gpu:
        record(c.engine)
    moody(c.engine, moods, follows)
    paused(c.engine, moods)
    wrong, made = checked(c.engine)
    result = answers(c, requests, rng)
    stats = c.engine.stats()
    c.engine.stop(0)
    memory.close()
    for make, (tokens, last), (others, end) in zip(requests, result, expected, strict=True):
        cancelled = last.finish_reason == "cancelled"
        assert cancelled or (last.finish_reason, last.message) == (end.finish_reason, end.message), make()
        others = others[: len(tokens) if cancelled else None]
        assert [token for token, _, _ in tokens] == [token for token, _, _ in others], make()
        for (_, log, top), (_, other, tops) in zip(tokens, others, strict=True):
            assert log == pytest.approx(other, abs=1e-3)
            assert dict(top) == pytest.approx(dict(tops), abs=1e-3)
    assert not wrong
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.drafted > 0 or not follows
    if drafter.name != "model itself" or not follows:
        return
    whole = defaultdict(list)
    for make, (tokens, _) in zip(requests, expected, strict=True):
        if likeliest(request := make()):
            whole[request.prompt] = max(whole[request.prompt], [*request.prompt, *(t for t, _, _ in tokens)], key=len)
    for text, n, tokens in made:
        # a text's last block may be full, and the guesses after it then stand where nothing is held
        if likeliest(text.request) and n % BLOCK and n % BLOCK + drafter.reach < BLOCK:
            known = whole[text.request.prompt][n : n + len(tokens)]
            assert tokens[: len(known)] == known
