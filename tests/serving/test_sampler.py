"""Requests that ask for more than a temperature: as `picking.Picker`, the definition, draws for one at a time."""

import random
import threading

import pytest
import torch
from asking import Client, build, prompts

from lowq_cli.engine.sampling import restrict
from lowq_cli.serving.request import Draw, Mask, Request, allow
from lowq_cli.serving.sampler import restrict_rows, restricted
from lowq_cli.serving.sampler_reference import Picker


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture
def client(model):
    made = Client(model, running=6)
    yield made
    made.engine.stop(0)


class Every(Mask):
    """A mask that lets through what can be divided by the number of tokens so far, plus 2."""

    def __init__(self):
        self.taken = []

    def fill(self, words):
        for token in range(0, 320, len(self.taken) + 2):
            allow(words, token)

    def accept(self, token):
        self.taken.append(token)


DRAWS = {
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {17: 100.0, 5: -100.0}},
    "log-probabilities": {"logprobs": 4},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}, "logprobs": 0},
    "mask": {},
    "plain": {},
}


def by_definition(model, prompt, n, draw, mask=None):
    """(tokens, log-probabilities, likeliest) of Picker over the model's own forward."""
    picker, tokens, logs = Picker(draw, mask, prompt, 320, torch.device("cpu")), [], []
    for _ in range(n):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[:, -1]
            tokens.append(int(picker.pick(logits)))
        if mask:
            mask.accept(tokens[-1])
        logs.append(picker.logprobs())
    return tokens, logs


def test_greedy_requests_of_all_kinds_side_by_side(model, client):
    prompt_ids = prompts(*(12 + 9 * i for i in range(len(DRAWS))))
    numbers = []
    for name, prompt in zip(DRAWS, prompt_ids, strict=True):
        draw = Draw(**DRAWS[name])
        mask = Every() if name == "mask" else None
        numbers.append(client.engine.submit(Request(tuple(prompt), 10, frozenset(), draw, mask)))
    for name, prompt, tokens, number in zip(DRAWS, prompt_ids, client.tokens(*numbers), numbers, strict=True):
        draw = Draw(**DRAWS[name])
        expected, logs = by_definition(model, prompt, 10, draw, Every() if name == "mask" else None)
        assert tokens == expected, name
        for event, (logprob, top) in zip(client.heard[number], logs, strict=True):
            assert (event.logprob is None) == (draw.logprobs is None)
            assert event.logprob == pytest.approx(logprob, abs=1e-4)
            assert [i for i, _ in event.top] == [i for i, _ in top]
            assert [v for _, v in event.top] == pytest.approx([v for _, v in top], abs=1e-4)


@pytest.mark.parametrize("what", ["fill", "accept"])
def test_a_mask_that_fails_ends_its_own_request(model, client, what):
    mask, prompt = Every(), prompts(20)[0]

    def fail(_):
        if len(mask.taken) == 3:
            raise ValueError("no rule\nfits")
        return getattr(Every, what)(mask, _)

    setattr(mask, what, fail)
    broken, fine = client.engine.submit(Request(tuple(prompt), 10, frozenset(), Draw(), mask)), client.ask(prompt, 10)
    assert len(client.tokens(fine)[0]) == 10
    events = client.follow(broken)[0]
    assert [e.finish_reason for e in events] == [None, None, None, "error"]
    assert "no rule" in events[-1].message
    assert events[-1].token is None
    assert len(client.tokens(client.ask(prompt, 3))[0]) == 3


WRONG = {"top_k": "much", "top_p": "much", "min_p": "much", "frequency_penalty": "much", "repetition_penalty": "much"}


@pytest.mark.parametrize("name", [*WRONG, "logit_bias"])
@pytest.mark.parametrize("beside", [{"frequency_penalty": 0.4, "logprobs": 2}, {"temperature": 1.0, "top_k": 5}, {}], ids=str)
def test_an_exception_of_one_texts_draw_ends_that_text_alone(model, client, name, beside):
    """A setting that no check would let through breaks what it is computed with; the others' texts are as ever."""
    draw = Draw(temperature=1.0, frequency_penalty=0.1)
    object.__setattr__(draw, name, WRONG.get(name, {5: "much"}))
    prompt, other = prompts(20, 31)
    alone = client.tokens(client.ask(other, 12, **beside))
    broken = client.engine.submit(Request(tuple(prompt), 10, frozenset(), draw))
    fine = [client.ask(other, 12, **beside) for _ in range(2)]
    assert client.tokens(*fine) == alone * 2
    (events,) = client.follow(broken)
    assert [e.finish_reason for e in events] == ["error"]
    assert client.tokens(client.ask(other, 12, **beside)) == alone


def test_penalties_survive_being_put_back(model):
    prompt_ids = prompts(40, 60, 62)
    draw = Draw(repetition_penalty=1.4, frequency_penalty=0.3)
    c = Client(model, running=3, cache_tokens=256)
    numbers = [c.engine.submit(Request(tuple(p), 80, frozenset(), draw)) for p in prompt_ids]
    tokens = c.tokens(*numbers)
    assert c.engine.stats().preemptions > 0
    c.engine.stop(0)
    assert tokens == [by_definition(model, p, 80, draw)[0] for p in prompt_ids]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.6, 0.0), (4, 0.8, 0.0), (0, 1.0, 0.2), (500, 1.0, 0)]
)
def test_restricted_samples_stay_inside_the_restriction(model, client, top_k, top_p, min_p):
    prompt = prompts(20)[0]
    how = {"temperature": 1.5, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = [t[0] for t in client.tokens(*(client.ask(prompt, 1, seed=s, **how) for s in range(40)))]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[:, -1].float() / 1.5
    p = restrict(logits, top_k, top_p).softmax(-1)
    allowed = set(((p > 0) & (p >= min_p * p.amax()))[0].nonzero()[:, 0].tolist())
    assert set(drawn) <= allowed
    assert len(set(drawn)) > 1


def test_restricting_by_row_is_restricting_each_row():
    torch.manual_seed(0)
    scores = torch.randn(7, 50) * 3
    scores[6, 10:] = float("-inf")  # as a mask leaves it
    settings = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (5, 0.5, 0.0), (90, 0.9, 0.0), (1, 0.1, 0.0), (20, 0.99, 0.0)]
    columns = torch.tensor(settings)
    result = restrict_rows(scores, columns[:, :1].long(), columns[:, 1:2], columns[:, 2:])
    for i, (k, p, _) in enumerate(settings):
        assert torch.equal(result[i], restrict(scores[i : i + 1], k, p)[0]), settings[i]
    least = restrict_rows(scores, torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1), torch.full((7, 1), 0.3))
    share = scores.softmax(-1) / scores.softmax(-1).amax(-1, keepdim=True)
    assert torch.equal(least.isfinite(), share >= 0.3)


def test_logits_that_stay_are_not_changed_by_a_restriction_nor_by_that_of_another_row():
    """Random settings and temperatures: the same bits, and the tokens of `Picker`'s restriction of each row alone."""
    r, g = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(60):
        V, n = r.choice((3, 33, 50, 161)), r.randint(1, 5)
        scores = torch.randn(n, V, generator=g) * r.choice((0.1, 3.0, 30.0))
        scores = scores.round() if r.random() < 0.3 else scores  # ties
        draws = [
            Draw(
                temperature=r.choice((1e-10, 0.3, 0.7, 1.3, 1e6)),
                top_k=r.choice((0, 0, 1, 5, V + 3)),
                top_p=r.choice((1.0, 1.0, 0.3, 0.9)),
                min_p=r.choice((0.0, 0.2)),
            )
            for _ in range(n)
        ]
        for row, kept, d in zip(scores, restricted(scores.clone(), draws), draws, strict=True):
            stays = kept.isfinite()
            assert torch.equal(kept[stays], row[stays]), d
            p = restrict(row[None] / d.temperature, d.top_k, d.top_p)[0]
            assert torch.equal(stays, p.isfinite() & ((p - p.max()).exp() >= d.min_p)), d


def test_a_bias_ends_with_its_text(model, client):
    """The next text to come into its row, from a row further on, has none."""
    first, second = prompts(9, 11, seed=5)
    expected = by_definition(model, second, 24, Draw(repetition_penalty=1.7))[0]
    numbers = [client.ask(first, 4, logit_bias={17: 100.0}), client.ask(second, 24, repetition_penalty=1.7)]
    assert client.tokens(*numbers) == [[17] * 4, expected]


class Lost:
    """A setting in whose place the GPU's last error comes up, once there is another request."""

    def __init__(self, both):
        self.both = both

    def __lt__(self, _):
        assert self.both.wait(60)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    __gt__ = __lt__

    def __bool__(self):
        return True


def test_a_lost_gpu_ends_the_engine_and_not_one_text_after_the_other(model):
    client, both = Client(model, running=3), threading.Event()
    draw = Draw(temperature=1.0)
    object.__setattr__(draw, "top_k", Lost(both))
    prompt, other = prompts(20, 31)
    numbers = [client.engine.submit(Request(tuple(prompt), 10, frozenset(), draw)), client.ask(other, 10)]
    both.set()
    ends = [events[-1] for events in client.follow(*numbers)]
    assert [(e.finish_reason, e.message) for e in ends] == [
        ("error", "the engine has stopped: CUDA error: an illegal memory access was encountered")
    ] * 2
    assert "illegal memory access" in client.engine.closed
