"""Drafts in the server: whatever is guessed, each answer is the one without, alone or among others.

A drafter that knows the answer guesses it up to a random depth, then something else, and now and then nothing: rejections at
every depth, steps with drafts and without them in turn, each text its own number.
"""

import copy
import math
import random
import time
from itertools import accumulate, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asking import ON_GPU, Client, Free, alone, build, check_all, prompts
from saying import byte_tokenizer

from lowq_cli.engine.drafts.drafter import Guess
from lowq_cli.engine.drafts.ngram import NGram
from lowq_cli.serving import draft_costs, flight, pass_pipeline, sampler
from lowq_cli.serving.draft_budget import PASS_GAIN, REMEMBERED, RUN, Answers, choose
from lowq_cli.serving.draft_costs import DraftCosts
from lowq_cli.serving.draft_rounds import BEHIND
from lowq_cli.serving.draft_trials import Trials
from lowq_cli.serving.flight import Flight
from lowq_cli.serving.http.answers import Answer
from lowq_cli.serving.http.rules import Rules
from lowq_cli.serving.http.text import Writer
from lowq_cli.serving.request import Draw, Event, Mask, Request, allow
from lowq_cli.serving.sampler_reference import Picker
from lowq_cli.serving.sequence import MANY, Sequence

KINDS = {
    "llama": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


TIES = {"float16": 0.004, "bfloat16": 0.02}  # how far logits may be from those in fp32, in the largest
THINKS = byte_tokenizer(special=("<think>", "</think>"), template="<think></think>")
TEXTS = SimpleNamespace(decode=lambda ids, **_: "x" * len(ids))


class Knowing:
    """Guesses what the text's answer is known to be, wrong from a random depth on."""

    name = "knowing"

    def __init__(self, answers, rng):
        self.answers, self.rng, self.made = answers, rng, 0

    def begin(self, prompt):
        self.answer = self.answers[tuple(prompt)]
        self._next()

    def extend(self, tokens):
        self.made += len(tokens)
        self._next()

    def _next(self):
        self.depth, self.chance = self.rng.randrange(16), self.rng.choice([0.0, 0.9, 0.9])

    def guess(self, most):
        if not self.chance:
            return Guess()
        made = list(self.answer[self.made : self.made + most])
        made += [3] * (most - len(made))
        if self.depth < most:
            made[self.depth] = (made[self.depth] + 1) % 320
        return Guess(made, [0.95] * most)


def knowing(client, answers, seed=0, ahead=False):
    """The client's engine with drafters that know the answers, and rows that cost nothing. ahead: as on a GPU."""
    drafts, rng = client.engine.drafts, random.Random(seed)
    check_all(drafts)
    drafts.drafter = lambda: Knowing(answers, rng)
    if ahead:
        client.engine.pipeline.ahead = 1
        drafts.go_ahead()
    return client


IN_TURN = ("llama, launched ahead", "gemma3_text, launched ahead")
ON_GPU_KINDS = {
    "llama": KINDS["llama"],
    "deepseek_v2": {
        "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


@pytest.fixture(
    scope="module", params=[*KINDS, *IN_TURN, *(pytest.param(f"{kind}, on a GPU", marks=ON_GPU) for kind in ON_GPU_KINDS)]
)
def model(request):
    """In fp32, in which no two tokens are as likely but for chance: a GPU's kernels of other numbers of rows draw the same."""
    kind, _, how = request.param.partition(", ")
    made = build(kind, **(KINDS | ON_GPU_KINDS)[kind]).to("cuda" if how == "on a GPU" else "cpu")
    made.ahead = how == "launched ahead"
    return made


@pytest.fixture
def client(model):
    made = []

    def make(answers, seed=0, **how):
        made.append(knowing(Client(model, draft="ngram", **how), answers, seed, model.ahead))
        return made[-1]

    yield make
    for c in made:
        c.engine.stop(0)


def counted(c):
    """Drafts were checked, and right ones among them; nothing is held any more."""
    s = c.engine.stats()
    assert 0 < s.accepted < s.drafted
    assert (s.running, s.waiting, s.blocks_used) == (0, 0, 0)
    return s


LENGTHS = (3, 130, 64, 65, 1, 200, 17, 63, 128, 40)


def test_answers_are_those_alone_and_come_in_fewer_passes(model, client):
    asked = prompts(*LENGTHS)
    wanted = {tuple(p): alone(model, p, 30 + i) for i, p in enumerate(asked)}
    for running in (1, 4):
        c = client(wanted, running=running)
        numbers = [c.ask(p, 30 + i) for i, p in enumerate(asked)]
        assert c.tokens(*numbers) == list(wanted.values())
        s = counted(c)
        assert s.steps < sum(map(len, wanted.values()))
        ends = [c.heard[n][-1] for n in numbers]
        assert {e.finish_reason for e in ends} == {"length"}
        right, wrong = map(sum, zip(*(e.drafted for e in ends), strict=True))
        assert (right, right + wrong) == (s.accepted, s.drafted)


def test_thirty_two_at_once(model, client):
    asked = prompts(*(5 + 3 * i for i in range(32)), seed=9)
    plain = Client(model, running=32)
    wanted = dict(zip(map(tuple, asked), plain.tokens(*[plain.ask(p, 30) for p in asked]), strict=True))
    plain.engine.stop(0)
    assert [wanted[tuple(p)] for p in asked[::8]] == [alone(model, p, 30) for p in asked[::8]]
    c = client(wanted, running=32)
    assert c.tokens(*[c.ask(p, 30) for p in asked]) == list(wanted.values())
    counted(c)


def test_a_beginning_from_the_cache_goes_on_as_one_that_was_computed(model, client):
    """Also one that a draft crossed, and the next turn of a conversation, over and over (snapshots at blocks' ends)."""
    prompt = prompts(100, seed=4)[0]
    answer = alone(model, prompt, 180)
    more = prompt + answer[:160] + [5, 6, 7]
    wanted = {tuple(prompt): answer, tuple(more): alone(model, more, 30)}
    plain = Client(model, running=3)
    for p, n in ((prompt, 180), (more, 30)) * 2:
        plain.tokens(plain.ask(p, n))
    hits = plain.engine.stats().prefix_hits
    plain.engine.stop(0)
    for seed in range(2):
        c = client(wanted, seed, running=3)
        for _ in range(2):
            assert c.tokens(c.ask(prompt, 180)) == [answer]
            assert c.tokens(c.ask(more, 30)) == [wanted[tuple(more)]]
        assert c.engine.stats().prefix_hits == hits > 0
        counted(c)


def test_a_cache_too_small_for_all(model, client):
    asked = prompts(*(30 + 11 * i for i in range(5)), seed=5)
    wanted = {tuple(p): alone(model, p, 70) for p in asked}
    for seed in range(2):
        c = client(wanted, seed, running=5, cache_tokens=320)
        assert c.tokens(*[c.ask(p, 70) for p in asked]) == list(wanted.values())
        counted(c)


def test_cancellations_are_not_noticed_by_the_others(model, client):
    asked = prompts(*(20 + i for i in range(9)))
    wanted = {tuple(p): alone(model, p, 60) for p in asked}
    c = client(wanted, running=4)
    numbers = [c.ask(p, 60) for p in asked]
    for i in (1, 4, 7):
        while len(c.heard.get(numbers[i], ())) < 2 + i:
            c.hear()
        c.engine.cancel(numbers[i])
    for i, got in enumerate(c.tokens(*numbers)):
        want = wanted[tuple(asked[i])]
        assert got == want[: len(got)]
        assert i in (1, 4, 7) or len(got) == 60
    counted(c)


def test_a_text_ends_at_its_stop_wherever_it_stands_in_a_step(model, client):
    prompt = prompts(50, seed=8)[0]
    answer = alone(model, prompt, 60)
    firsts = [i for i, t in enumerate(answer) if t not in answer[:i]]
    c = client({tuple(prompt): answer}, running=2)
    for i in firsts[:: max(1, len(firsts) // 12)]:
        events = c.follow(c.ask(prompt, 60, stop=[answer[i]]))[0]
        assert [e.token for e in events] == answer[: i + 1]
        assert [e.finish_reason for e in events] == [None] * i + ["stop"]
    counted(c)


def test_drawn_texts_are_those_of_their_seed(model, client):
    asked = prompts(40, 9, 100, 33)
    plain = Client(model, running=4)
    how = [{"temperature": 0.8, "seed": 11 + i} for i in range(4)]
    wanted = {tuple(p): plain.tokens(plain.ask(p, 50, **h))[0] for p, h in zip(asked, how, strict=True)}
    plain.engine.stop(0)
    c = client(wanted, running=4)
    assert c.tokens(*[c.ask(p, 50, **h) for p, h in zip(asked, how, strict=True)]) == list(wanted.values())
    counted(c)


class Even(Mask):
    """A grammar of even tokens, which counts the tokens that it was given."""

    recipe = ""

    def __init__(self):
        self.seen = []

    def fill(self, words):
        words[:] |= 0x55555555

    def accept(self, token):
        assert token % 2 == 0
        self.seen.append(token)


OPTIONS = (
    {"logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "seed": 8, "logprobs": 0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4},
    {"logit_bias": {7: -100, 9: 5}},
    {"temperature": 1.0, "top_k": 5, "seed": 3},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.05, "seed": 4},
)


def logs(events):
    """The log-probabilities of each token of an answer, and of the likeliest ones."""
    return [(e.logprob, [i for i, _ in e.top], [v for _, v in e.top]) for e in events]


def approximately(expected):
    return [(pytest.approx(own, abs=1e-4), ids, pytest.approx(values, abs=1e-4)) for own, ids, values in expected]


def test_penalties_and_grammars_hold_next_to_requests_with_drafts(model, client):
    """Each option, a grammar, and texts that draft, in the same passes: as each is without drafts."""
    asked = prompts(*(30 + i for i in range(len(OPTIONS) + 3)), seed=6)
    n = len(OPTIONS)
    plain = Client(model, running=9)
    told = [plain.follow(plain.ask(p, 40, **how))[0] for p, how in zip(asked, OPTIONS, strict=False)]
    plain.engine.stop(0)
    wanted = {tuple(p): [e.token for e in events] for p, events in zip(asked, told, strict=False)}
    wanted |= {tuple(p): alone(model, p, 40) for p in asked[n:]}
    c, mask = client(wanted, running=9), Even()
    with_mask = c.engine.submit(Request(tuple(asked[0]), 40, frozenset(), Draw(), mask))
    numbers = [c.ask(p, 40, **how) for p, how in zip(asked, OPTIONS, strict=False)] + [c.ask(p, 40) for p in asked[n:]]
    found = c.follow(*numbers)
    assert c.tokens(*numbers) == list(wanted.values())
    for ours, theirs in zip(found, told, strict=False):
        assert [e.token for e in ours] == [e.token for e in theirs]
        assert logs(ours) == approximately(logs(theirs))
    assert c.tokens(with_mask) == [mask.seen]
    assert len(mask.seen) == 40
    assert all(sum(events[-1].drafted) > 0 for events in found)
    counted(c)


class Sums(Mask):
    """Allows the tokens that leave the same remainder as the sum of those so far; of drafts it takes some, at random."""

    takes_drafts = True

    def __init__(self, step, seed):
        self.step, self.sum, self.rng = step, 0, random.Random(seed)

    def fill(self, words):
        self._fill(words, self.sum)

    def _fill(self, words, total):
        for token in range(total % self.step, 320, self.step):
            allow(words, token)

    def fill_drafts(self, words, drafts):
        self._fill(words[0], self.sum)
        sums = list(accumulate(drafts, initial=self.sum))
        taken = min(self.rng.choice([1, 3, 99]), len(drafts))
        for i in range(1, taken + 1):
            if (drafts[i - 1] - sums[i - 1]) % self.step:
                return i - 1  # it does not allow that one
            words[i] = 0
            self._fill(words[i], sums[i])
        return taken

    def accept(self, token):
        assert (token - self.sum) % self.step == 0
        self.sum += token


def combination(rng):
    """(settings, stop ids, a function that makes the mask), each there or not."""
    some = {
        "repetition_penalty": rng.choice([0.7, 1.3, 2.0]), "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-1, 2), "logit_bias": {rng.randrange(320): rng.uniform(-50, 20) for _ in range(9)},
        "top_k": rng.randint(1, 40), "top_p": rng.uniform(0.5, 1), "min_p": rng.uniform(0, 0.2), "logprobs": rng.randint(0, 5),
    }  # fmt: skip
    how = {name: value for name, value in some.items() if rng.random() < 0.5}
    how |= {"temperature": rng.choice([0.0, 0.7, 1.3]), "seed": rng.randrange(1 << 40)}
    stop = frozenset(rng.sample(range(320), rng.choice([0, 20])))
    step, seed, least, thinking = (
        rng.choice([0, 0, 3, 40]),
        rng.random(),
        rng.choice([0, 0, 9, 60]),
        rng.choice([None, 1, 9, 30]),
    )
    step = 0 if thinking else step  # a form has room for the end of thoughts, and Sums does not

    def mask():
        inner = Sums(step, seed) if step else None
        rules = Rules(least, thinking, True, form="a form" if step else "", ends=sorted(stop))
        return rules.mask(THINKS, lambda form: inner) if least or thinking else inner

    return how, stop, mask


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "tokens"])
def test_a_budget_of_thoughts_allows_after_drafts_what_it_would_after_these_tokens(special):
    """Drafts at random, among them marks of thoughts in one token or in several, characters in pieces, and the answer's end.

    All drafts are taken where the budget is far, and those up to it otherwise.
    """
    tokenizer, rng, taken = byte_tokenizer(special=special, template="<think></think>"), random.Random(5), []
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    pieces = [ids(text) for text in ("<think>", "</think>", "</think>\n\n", "<thi", "a", "bc\n", "\u25c1")]
    pieces += [[ids("\u25c1")[0]], [tokenizer.eos_token_id]]
    for _ in range(300):
        thinking, least = rng.choice([0, 1, 2, 5, 12, 99]), rng.choice([0, 0, 6])
        rules = Rules(least, thinking, rng.random() < 0.5, ends=[tokenizer.eos_token_id])
        mask, text = rules.mask(tokenizer, None), []
        for _ in range(12):
            drafts = [token for _ in range(rng.randint(1, 5)) for token in rng.choice(pieces)][:15]
            words = np.zeros((16, 9), np.int32)
            n = mask.fill_drafts(words[: 1 + len(drafts)], drafts)
            again = rules.mask(tokenizer, None)
            for token in text:
                again.accept(token)
            for i in range(n + 1):
                row = np.zeros(9, np.int32)
                again.fill(row)
                assert words[i].tolist() == row.tolist(), (thinking, text, drafts[:i])
                again.accept(([*drafts, 0])[i])
            taken.append((thinking, n, len(drafts)))
            token = next(t for t in [*drafts[:1], *range(288)] if words[0][t // 32] >> t % 32 & 1)
            text.append(token)
            mask.accept(token)
            if token == tokenizer.eos_token_id:
                break
    assert all(n == given for thinking, n, given in taken if thinking == 99)
    assert {n for thinking, n, _ in taken if thinking == 12} >= {3, 10, 15}
    assert any(n < given for _, n, given in taken)


@pytest.mark.parametrize("seed", range(3))
def test_any_settings_together_are_answered_as_without_drafts(model, client, seed):
    """Penalties, biases, restrictions, grammars, min_tokens, budgets of thoughts, stop tokens and log-probabilities, at random
    and in the same passes."""
    rng = random.Random(seed)
    some = [combination(rng) for _ in range(12)]
    asked = prompts(*(20 + 7 * i for i in range(12)), seed=30 + seed)

    def ask(c):
        given = [Request(tuple(p), 40, s, Draw(**how), mask()) for p, (how, s, mask) in zip(asked, some, strict=True)]
        return c.follow(*[c.engine.submit(request) for request in given])

    plain = Client(model, running=6)
    without = ask(plain)
    told = [[(e.token, e.finish_reason) for e in events] for events in without]
    plain.engine.stop(0)
    assert {events[-1][1] for events in told} == {"stop", "length"}
    answers = ([token for token, _ in events] for events in told)
    c = client(dict(zip(map(tuple, asked), answers, strict=True)), seed, running=6)
    heard = ask(c)
    assert [[(e.token, e.finish_reason) for e in events] for events in heard] == told
    assert list(map(logs, heard)) == [approximately(logs(events)) for events in without]
    assert sum(sum(events[-1].drafted) > 0 for events in heard) > 9
    counted(c)


def doubted(logits, request, mask, tokens, by):
    """Places of an answer's tokens that are not drawn by these logits (n, V), by the definition, also not if each of the tokens
    that may be as likely is `by` away from its logit."""
    picker, result = Picker(request.draw, mask, request.prompt, logits.shape[1], logits.device), []
    for i, token in enumerate(tokens):
        before, raw = (picker.counts.clone(), picker.seen.clone(), picker.pos.clone()), logits[i : i + 1].clone()
        for tries in range(4):
            picker.counts, picker.seen, picker.pos = (t.clone() for t in before)
            if (drawn := int(picker.pick(raw))) == token:
                break
            raw[0, token] += by * (tries == 0)
            raw[0, drawn] -= by
        else:
            result.append(i)
        picker.counts, picker.seen = (t.clone() for t in before[:2])
        picker.counts[token] += 1
        picker.seen[0, token] = True
        if mask is not None:
            mask.accept(token)
    return result


@pytest.mark.parametrize(
    ("kind", "device", "dtype"),
    [
        ("llama", "cpu", "bfloat16"),
        pytest.param("llama", "cuda", "float16", marks=ON_GPU),
        pytest.param("llama", "cuda", "bfloat16", marks=ON_GPU),
        pytest.param("gemma3_text", "cuda", "bfloat16", marks=ON_GPU),
    ],
)
def test_tokens_in_half_precision_are_drawn_by_definition_or_as_likely(kind, device, dtype):
    """Logits of half precision often tie, and kernels of other numbers of rows then draw other tokens, also on a CPU, where
    seconds decide how many drafts a pass has: so each token is compared with what fp32 draws after the same text."""
    model = build(kind, **KINDS[kind]).to(getattr(torch, dtype))
    exact, rng = copy.deepcopy(model).float(), random.Random(7)
    model = model.to(device)
    some, asked = [combination(rng) for _ in range(24)], prompts(*(20 + 5 * i for i in range(24)), seed=41)

    def requests():
        return [Request(tuple(p), 40, s, Draw(**how), mask()) for p, (how, s, mask) in zip(asked, some, strict=True)]

    def answers(c):
        return [[e.token for e in events] for events in c.follow(*[c.engine.submit(one) for one in requests()])]

    plain = Client(model, running=12)
    known = answers(plain)
    plain.engine.stop(0)
    c = knowing(
        Client(model, draft="ngram", running=12), dict(zip(map(tuple, asked), known, strict=True)), ahead=device == "cpu"
    )
    made = answers(c)
    c.engine.stop(0)
    s, other = c.engine.stats(), 0
    assert 0 < s.accepted < s.drafted
    for tokens, one, (*_, mask) in zip(made, requests(), some, strict=True):
        with torch.inference_mode():
            logits = exact(torch.tensor([[*one.prompt, *tokens]])).logits[0, len(one.prompt) - 1 : -1].to(device)
        by = float(logits.abs().max()) * TIES[dtype]
        assert not doubted(logits, one, mask(), tokens, by)
        other += len(doubted(logits, one, mask(), tokens, 0.0))
    assert other < 0.05 * sum(map(len, made))


@pytest.mark.parametrize("ahead", [False, True])
def test_sixteen_sequences_that_are_sampled_and_drafted_by_n_grams(ahead):
    """Each has settings of its own; the second time n-grams go on from the first answers."""
    model = build("llama")
    asked = [p + p for p in prompts(*(9 + i for i in range(16)), seed=21)]
    some = (
        {},
        {"top_k": 20, "top_p": 0.95},
        {"min_p": 0.1, "repetition_penalty": 1.1},
        {"top_k": 3},
        {"frequency_penalty": 0.2},
    )
    how = [{"temperature": 0.6 + i / 20, "seed": 100 + i, **some[i % 5]} for i in range(16)]
    plain = Client(model, running=16)
    wanted = plain.tokens(*[plain.ask(p, 40, **h) for p, h in zip(asked, how, strict=True)])
    plain.engine.stop(0)
    c = Client(model, draft="ngram", running=16)
    check_all(c.engine.drafts)
    if ahead:
        c.engine.ahead = 1
        c.engine.drafts.go_ahead()
    for _ in range(2):
        assert c.tokens(*[c.ask(p, 40, **h) for p, h in zip(asked, how, strict=True)]) == wanted
    c.engine.stop(0)
    s = c.engine.stats()
    assert 16 * 20 < s.accepted < s.drafted
    assert all(events[-1].drafted[0] for events in list(c.heard.values())[16:])


def test_an_error_in_drawing_one_sequence_again_leaves_the_others(model, client, monkeypatch):
    """As where there is no memory for its logits."""
    asked = prompts(20, 30, 40)
    how = [{"temperature": 1.0, "top_k": k, "seed": k} for k in (4, 5, 6)]
    plain = Client(model, running=3)
    wanted = plain.tokens(*[plain.ask(p, 30, **h) for p, h in zip(asked, how, strict=True)])
    plain.engine.stop(0)
    whole = sampler.restricted

    def without_five(scores, draws):
        if any(d.top_k == 5 for d in draws):
            raise MemoryError("no room")
        return whole(scores, draws)

    monkeypatch.setattr(sampler, "restricted", without_five)
    c = client(dict(zip(map(tuple, asked), wanted, strict=True)), running=3)
    heard = c.follow(*[c.ask(p, 30, **h) for p, h in zip(asked, how, strict=True)])
    assert [[e.token for e in heard[i]] for i in (0, 2)] == [wanted[0], wanted[2]]
    assert heard[1][-1].finish_reason == "error"
    assert "no room" in heard[1][-1].message


def test_guesses_of_n_grams_and_of_earlier_answers(model):
    prompt = prompts(30, seed=12)[0]
    c = Client(model, draft="ngram", running=2)
    check_all(c.engine.drafts)
    wanted = alone(model, prompt, 120)
    assert c.tokens(c.ask(prompt, 120)) == [wanted]
    first = c.engine.stats()
    assert c.tokens(c.ask(prompt, 120)) == [wanted]
    second = c.engine.stats()
    c.engine.stop(0)
    assert second.accepted - first.accepted >= first.accepted
    assert second.steps - first.steps < first.steps


def test_without_drafts_and_where_there_are_none(model):
    for how, why in (({}, "as asked"), ({"draft": "ngram", "deterministic": True}, "the same kernels")):
        c = Client(model, **how)
        assert c.engine.drafts is None
        assert why in c.engine.why_no_drafts
        c.tokens(c.ask(prompts(5)[0], 5))
        assert c.engine.stats().drafted == 0
        c.engine.stop(0)


def test_the_pass_that_brings_the_most_is_chosen():
    sizes = [2, 4, 8, 16, 32]
    flat, steep = (lambda rows: 1.0 + 0.01 * rows), (lambda rows: float(rows))
    sure, doubtful = [0.95] * 15, [0.4] * 15
    counts = lambda *args: choose(*args).counts  # noqa: E731
    assert counts([(1, sure)], 1, sizes, flat, 1.01) == {1: 15}
    assert counts([(1, sure)], 1, sizes, steep, 1.0) == {}
    assert counts([(1, sure), (2, doubtful)], 2, [4, 8], flat, 1.02) == {1: 6}
    assert counts([(1, sure), (2, sure)], 2, [4, 8], flat, 1.02) == {1: 3, 2: 3}
    assert counts([(1, doubtful)], 8, sizes, flat, 1.08) == {}
    assert counts([], 3, sizes, flat, 1.0) == {}


@pytest.mark.parametrize("seed", range(40))
def test_no_other_numbers_of_drafts_bring_more_and_none_where_plain_passes_bring_as_much(seed):
    """All numbers of drafts of three sequences are tried, with costs and chances at random."""
    rng = random.Random(seed)
    chances = [(i, [rng.choice([0.2, 0.5, 0.8, 0.95]) for _ in range(rng.randint(0, 3))]) for i in range(3)]
    sizes, texts, plain_s = [4, 6, 8, 12], 3 + rng.randrange(2), 1.0
    cost = dict(zip(sizes, accumulate([1.0] + [rng.choice([0.0, 0.05, 0.3, 0.8]) for _ in sizes[1:]]), strict=True))
    gap = rng.choice([0.0, 0.2])
    seconds = lambda rows: cost[rows] + gap  # noqa: E731

    def rate(counts):
        rows = texts + sum(counts)
        right = sum(math.prod(each[: k + 1]) for (_, each), n in zip(chances, counts, strict=True) for k in range(n))
        return (texts + right) / seconds(next(s for s in sizes if s >= rows)) if rows > texts else texts / plain_s

    best = max(rate(counts) for counts in product(*(range(len(each) + 1) for _, each in chances)))
    chosen = choose(chances, texts, sizes, seconds, plain_s).counts
    found = rate([chosen.get(i, 0) for i in range(3)])
    assert found == pytest.approx(best if chosen else texts / plain_s)
    assert bool(chosen) == (best > PASS_GAIN * texts / plain_s)


def test_a_pass_leaves_no_sequence_too_far_behind_plain_passes():
    """Passes of 8 rows take 1.9 plain ones: sequence 2 has no drafts, and 1 is given what its drafts will bring."""
    sizes, seconds = [4, 8], {4: 1.5, 8: 1.9}.__getitem__

    def chosen(*latest):
        return choose([(1, [0.95] * 6)], 2, sizes, seconds, 1.0, dict(enumerate(latest, 1))).counts

    assert chosen(3.0, 3.0) == {1: 6}
    assert chosen(-1.0, 1.9) == {1: 6}  # six drafts are to bring 4.8 tokens
    assert chosen(3.0, 1.8) == {1: 2}
    assert chosen(3.0, 1.4) == {}
    assert chosen(-6.0, 3.0) == {}
    assert choose([(1, [0.95] * 6)], 2, sizes, seconds, 1.0).counts == {1: 6}


class Passes(Free):
    """Passes with drafts take 1.5 seconds, plain ones 1."""

    def plain_s(self, texts):
        return 1.0

    def pass_s(self, rows, texts, plain_s):
        return 1.5


@pytest.mark.parametrize("copying", [1, 4])
def test_sequences_without_drafts_lose_little_to_those_that_copy(copying, monkeypatch):
    """Of four sequences one has right drafts, and then all."""
    model, asked = build("llama"), prompts(9, 20, 31, 42, seed=2)
    wanted = {tuple(p): alone(model, p, 60) for p in asked}
    c = knowing(Client(model, draft="ngram", running=4), wanted)
    drafts, know, lines, ends = c.engine.drafts, [], [], []
    monkeypatch.setattr(c.engine.passes.token_budget, "drafted", ends.append)
    drafts.costs = Passes(drafts.costs)
    first = iter([False] * 8)  # plain passes, whose seconds are measured; those of the balance include the host's for prompts
    allows = lambda n: next(first, True)  # noqa: E731
    none = {"passed": lambda *_: None, "interrupted": int, "waits": lambda n: False}
    drafts._trials = SimpleNamespace(allows=allows, plain_s=lambda n: 1.4, **none)
    clock = [0.0]
    monkeypatch.setattr(pass_pipeline, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=time.monotonic))
    monkeypatch.setattr(flight, "time", pass_pipeline.time)
    read = Flight.read

    def waiting(one):
        clock[0] += 1.5 if one.rows else 1.0
        return read(one)[0], 1.0  # the device is sooner than the host

    monkeypatch.setattr(Flight, "read", waiting)

    def drafter():
        knows = Knowing(wanted, SimpleNamespace(randrange=lambda n: 2, choice=max))  # two drafts are right
        knows.guess = knows.guess if len(know) < copying else lambda most: Guess()
        know.append(knows)
        return knows

    drafts.drafter = drafter
    landed = drafts.landed
    drafts.landed = lambda *how: lines.append([t.lead_s for t, *_ in how[0].drew]) or landed(*how)
    assert c.tokens(*[c.ask(p, 60) for p in asked]) == list(wanted.values())
    c.engine.stop(0)
    assert ends == [1.0] * len(lines)  # the scheduler's waits end with these passes, too
    least = min(min(leads) for leads in lines)
    if copying == 1:
        assert -BEHIND - 0.5 <= least < -BEHIND / 2
        assert BEHIND / 0.5 <= len(lines) <= 1 + BEHIND / 0.5  # passes with drafts
    else:
        assert least == 0.0
        assert c.engine.stats().steps < 30


def test_the_time_without_requests_is_no_delay_of_passes_with_drafts():
    """After a pause the first pass with drafts is launched while the prompt is read, and the last result is from before it."""
    [prompt], launched = prompts(30), []
    model = build("llama")
    c = knowing(Client(model, draft="ngram", running=1), {tuple(prompt): alone(model, prompt, 40)}, ahead=True)
    c.engine.drafts.costs.launched = lambda seconds, ahead: launched.append(seconds)
    for _ in range(2):
        c.tokens(c.ask(prompt, 40))
        time.sleep(0.5)
    c.engine.stop(0)
    assert len(launched) > 4
    assert max(launched) < 0.4


def costs_of(seconds):
    """The costs of passes whose seconds by rows are these."""
    passes = SimpleNamespace(seconds={(rows, False): s for rows, s in seconds.items()}, device=torch.device("cuda"))
    passes.size, passes.passes = (lambda rows: rows), SimpleNamespace(token_budget=SimpleNamespace(extra=0.0))
    return DraftCosts(passes, None, None)


def test_a_delay_of_passes_with_drafts_does_not_turn_them_off_for_ever():
    """Such as that of a busy host: where no pass has drafts, none would tell that it is over."""
    costs = costs_of({4: 1.7e-3})
    costs.passed(1, 4, 20e-3, False)
    assert costs.pass_s(4, 1, 1.3e-3) < 4e-3
    costs.launched(5.0, ahead=False)
    costs.launched(5.0, ahead=True)
    costs.chosen(False)
    costs.chosen(True)
    assert costs.gap_s > 0.4 < costs.late_s
    for _ in range(draft_costs.AGAIN):
        costs.chosen(False)
    assert (costs.gap_s, costs.late_s) == (draft_costs.GAP_S, 0.0)
    assert costs.pass_s(4, 1, 1.3e-3) == 1.7e-3


def test_a_delay_after_results_does_not_keep_passes_from_waiting_for_them_for_ever():
    """Passes that are launched before the result of the last one do not show that it is over."""
    costs = costs_of({4: 1.7e-3})
    costs.launched(5.0, ahead=False)
    for some in (*[False] * (draft_costs.AGAIN - 1), True, *[False] * (draft_costs.AGAIN - 1)):
        costs.waited(some)
        costs.chosen(True)
        assert costs.gap_s > 0.4
    costs.waited(False)
    assert costs.gap_s == draft_costs.GAP_S


def test_earlier_answers_are_remembered_and_the_oldest_forgotten():
    answers, rng = Answers(), np.random.default_rng(0)
    texts = [rng.integers(0, 1000, 4000).tolist() for _ in range(40)]
    for text in texts:
        answers.add(text)
        text, place = answers.find(tuple(text[100 : 100 + RUN]))
        assert text[place] == text[100 + RUN]
    assert answers.tokens <= REMEMBERED
    assert len(answers.places) <= REMEMBERED
    assert answers.find(tuple(texts[0][100 : 100 + RUN])) is None
    assert answers.find(tuple(texts[-1][:2])) is None
    answers.add([1, 2])


def test_usage_tells_drafts_that_were_right_and_wrong():
    def usage(*drafted):
        writers = []
        for one in drafted:
            writers.append(Writer(TEXTS, (1, 2), (), frozenset()))
            writers[-1].push([Event(5), Event(6, finish_reason="length", drafted=one)])
        return Answer(None, None, writers, 2, None, "m", [""] * len(writers)).usage()["completion_tokens_details"]

    assert usage((3, 1), (4, 0)) == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 1,
    }
    assert usage((0, 0)) == {"reasoning_tokens": 0}


def run(pass_s, passes, plain_s=0.47, trials=None, size=16):
    """(tokens per second relative to plain passes, share of drafts); pass_s: pass -> (tokens, seconds) with drafts."""
    trials, now, tokens, drafted = trials or Trials(), 0.0, 0.0, 0
    for i in range(passes):
        drafts = trials.allows(size)
        got, seconds = pass_s(i) if drafts else (1.0, plain_s)
        now, tokens, drafted = now + seconds, tokens + got, drafted + drafts
        trials.passed(size, round(size * got), size, now)
    return tokens / now * plain_s, drafted / passes


@pytest.mark.parametrize("seconds", [0.48, 0.6, 0.8, 1.5, 3.0])
@pytest.mark.parametrize("tokens", [1.0, 1.25])
@pytest.mark.parametrize("passes", [700, 20000])
def test_drafts_that_do_not_pay_cost_two_percent_at_most(seconds, tokens, passes):
    assert run(lambda i: (tokens, seconds), passes)[0] > 0.98


@pytest.mark.parametrize("seconds", [0.48, 0.8, 3.0])
@pytest.mark.parametrize(("passes", "least"), [(300, 0.93), (1000, 0.95), (20000, 0.99)])
def test_for_one_user_drafts_that_do_not_pay_cost_more_at_first_and_no_more_later(seconds, passes, least):
    assert run(lambda i: (1.0, seconds), passes, size=1)[0] > least


@pytest.mark.parametrize(("size", "soon"), [(1, True), (2, True), (8, False), (64, False)])
def test_a_first_trial_that_fails_is_chance_with_few_sequences(size, soon):
    """The text is hard to guess until the first trial has failed, then it is not."""
    trials, tried = Trials(), []

    def passed(i):
        tried.append(i)
        return (1.0 if len(tried) < 20 else 2.0), 0.65

    speed, share = run(passed, 400, trials=trials, size=size)
    assert (share > 0.5) == (speed > 1.15) == soon
    assert tried[0] == {1: 17, 2: 33}.get(size, 129)


def test_drafts_that_are_given_up_are_tried_again():
    trials = Trials()
    run(lambda i: (3.0, 0.8), 300, trials=trials)
    assert trials.allows(16)
    trials.give_up(16)
    assert not trials.allows(16)
    assert run(lambda i: (3.0, 0.8), 2000, trials=trials)[1] > 0.9


def test_drafts_that_pay_are_used_and_come_back_when_they_do():
    speed, share = run(lambda i: (3.0, 0.8), 4000)
    assert share > 0.9
    assert speed > 1.6
    speed, share = run(lambda i: (3.0 if i > 30000 else 1.0, 0.8), 100000)
    assert share > 0.4  # of at most 0.7
    late = random.Random(0)  # some passes wait for other processes
    assert run(lambda i: (3.0, 0.8 + 8 * (late.random() < 0.01)), 20000)[1] > 0.6


def test_drafts_that_come_in_bursts_stay_on_between_them():
    """Half of the texts copy; in the other half the host looks for drafts in vain, which takes 8% of a pass."""
    bursts = lambda i: (9.0, 0.9) if i // 100 % 2 and i % 5 == 0 else (1.0, 0.47 * 1.08)  # noqa: E731
    speed, share = run(bursts, 20000)
    assert share > 0.9
    assert speed > 1.5


@pytest.mark.parametrize("once", [True, False])
def test_texts_that_drafters_read_when_drafts_begin_do_not_turn_them_off(once):
    """16 texts are read in the first 8 passes with drafts; the same time in passes that are not marked is a loss."""
    trials, now, since, drafted = Trials(), 0.0, 0, 0
    for _ in range(4000):
        since = since + 1 if trials.allows(16) else 0
        got, seconds = (3.0, 0.8) if since else (1.0, 0.47)
        reads = 0 < since <= 8
        now += seconds + 2.5 * reads
        trials.passed(16, round(16 * got), 16, now, reads and once)
        drafted += since > 0
    assert (drafted > 3600) == once


@pytest.mark.parametrize(("idle", "pay"), [(0.005, False), (0.0026, True), (0.0, True)])
def test_the_idle_time_before_passes_with_prompts_counts(idle, pay):
    """With drafts the device waits for the host before each pass with prompts: 2.6 ms for 16 users of an 8B on an H200."""
    trials, now, spent, tokens, drafted = Trials(), 0.0, 0.0, 0, 0
    for i in range(40000):
        drafts, prompts = trials.allows(16), i % 4 == 0
        if prompts:
            now, spent = now + 0.003 + idle * drafts, spent + idle * drafts
            trials.passed(16, 0, 16, now, False, 0.003)
            continue
        got, seconds = (48, 0.0048) if drafts else (16, 0.00209)
        now, spent, tokens, drafted = now + seconds, spent + seconds, tokens + got, drafted + drafts
        trials.passed(16, got, 16, now)
    assert tokens / spent > 0.98 * 16 / 0.00209
    assert (drafted > 20000) == pay


def test_a_size_below_one_that_pays_takes_drafts_at_once():
    trials = Trials(lambda size: 0.47)
    for i in range(2000):
        trials.passed(16, 16 * (3 if trials.allows(16) else 1), 16, 0.47 * i)
    assert trials.allows(16)
    assert trials.allows(8)
    assert trials.plain_s(8) == 0.47
    assert not trials.allows(32)


def test_passes_that_do_not_follow_one_another_and_other_sizes_are_not_compared():
    trials = Trials()
    for i in range(5000):  # each pass is of another size than the one before, or follows prompts
        trials.passed(8 if i % 2 else 2, 8, 8, float(i))
        trials.interrupted() if i % 3 else None
    assert not trials.allows(8)
    assert not trials.allows(2)


@pytest.mark.parametrize("sizes", [(1,), (3, 50, 2), (400,), (MANY, MANY + 1, 1)])
def test_tokens_that_a_drafter_was_not_given_for_a_while_are_found_as_the_others(sizes):
    rng = random.Random(len(sizes))
    ids = [rng.randrange(5) for _ in range(600)]
    text, whole = Sequence(1, Request(tuple(ids[:40]), 600)), NGram()
    whole.begin(ids[:40])
    text.drafter, at, i = NGram(), 40, 0
    while at < len(ids):
        end = min(len(ids), at + sizes[i % len(sizes)])
        text.tokens += ids[at:end]
        text.feed()
        whole.extend(ids[at:end])
        at, i = end, i + 1
        assert text.drafter.tokens == whole.tokens == text.tokens
        for one in (text.drafter, whole):
            one.index(at)
        assert text.drafter.places == whole.places
    text.drafter.begin([7, 7, 1])
    text.drafter.index(len(ids) + 2)
    assert text.drafter.places[7, 7] == len(ids) + 2
