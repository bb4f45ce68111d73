"""Many requests at once: each answered as if it were alone."""

import pytest
from asking import Client, alone, build, prompts

from lowq_cli.serving.request import Busy, Draw, Mask, Request
from lowq_packers.errors import UnsupportedError, UsageError


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def windowed():
    return build("gemma3_text", sliding_window=6, layer_types=["sliding_attention", "full_attention"])


@pytest.fixture
def client(model, request):
    results = []

    def make(of=model, **how):
        results.append(Client(of, **how))
        return results[-1]

    yield make
    for c in results:
        c.engine.stop(0)


LENGTHS = (3, 130, 64, 65, 1, 200, 17, 63, 128, 40)


@pytest.mark.parametrize("kind", ["model", "windowed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_each_answer_is_the_one_of_the_prompt_alone(kind, deterministic, client, request):
    model = request.getfixturevalue(kind)
    prompt_ids = prompts(*LENGTHS)
    c = client(model, running=4, deterministic=deterministic)
    expected = [alone(model, p, 5 + i) for i, p in enumerate(prompt_ids)]
    numbers = [c.ask(p, 5 + i) for i, p in enumerate(prompt_ids)]
    assert c.tokens(*numbers) == expected
    assert {e.finish_reason for n in numbers for e in c.heard[n][:-1]} == {None}
    assert {c.heard[n][-1].finish_reason for n in numbers} == {"length"}
    s = c.engine.stats()
    assert (s.running, s.waiting, s.blocks_used) == (0, 0, 0)
    assert s.prompt_tokens == sum(LENGTHS)
    assert s.new_tokens == sum(map(len, expected))


@pytest.mark.parametrize(
    ("tokens", "kv"), [(192, "16"), (320, "16"), pytest.param(192, "fp8", marks=pytest.mark.more), (192, "4")]
)
def test_a_cache_too_small_for_all_answers_all_the_same(model, client, tokens, kv):
    """Texts give back their blocks and are computed again."""
    prompt_ids = prompts(*(30 + 11 * i for i in range(5)), seed=5)
    c = client(running=4, cache_tokens=tokens, kv=kv)
    expected = [alone(model, p, 60, kv) for p in prompt_ids]
    assert c.tokens(*[c.ask(p, 60) for p in prompt_ids]) == expected
    assert c.engine.stats().preemptions > 0
    assert c.engine.stats().blocks_used == 0


@pytest.mark.half_of("kv", "deterministic")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv", ["fp8", "4"])
def test_a_cache_in_few_bits_answers_each_as_alone(model, client, kv, deterministic):
    """With beginnings that are shared."""
    common = prompts(130)[0]
    requests = [*([*common, *p] for p in prompts(20, 9, 40)), *prompts(70, 33, 64)]
    drawn = {"temperature": 2.0, "seed": 5}  # greedy, models of random weights say much the same whatever they hold
    expected = [alone(model, p, 24, kv, **drawn) for p in requests]
    assert expected != [alone(model, p, 24, **drawn) for p in requests]
    c = client(running=4, kv=kv, deterministic=deterministic, cache_tokens=256)
    assert c.tokens(*[c.ask(p, 24, **drawn) for p in requests]) == expected
    assert c.engine.stats().prefix_hits + deterministic > 0


class Parity(Mask):
    """A grammar of odd and even tokens in turn."""

    def __init__(self):
        self.accepted = []

    def fill(self, words):
        words[:] = -0x55555556 if len(self.accepted) % 2 else 0x55555555  # bits 1, 3, ... or 0, 2, ...

    def accept(self, token):
        assert token % 2 == len(self.accepted) % 2
        self.accepted.append(token)


def test_deterministic_answers_are_the_same_to_the_last_bit_also_where_they_were_computed_again(model, client):
    prompt_ids = prompts(*(30 + 7 * i for i in range(8)), seed=5)
    settings = {"temperature": 1.0, "logprobs": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.1}

    def ask(c, i):
        mask = Parity() if i % 3 == 0 else None
        return c.engine.submit(Request(tuple(prompt_ids[i]), 90, draw=Draw(**settings, seed=i), mask=mask)), mask

    roomy, narrow = (client(running=6, cache_tokens=n, deterministic=True) for n in (4000, 320))
    alone = [roomy.follow(ask(roomy, i)[0])[0] for i in range(len(prompt_ids))]
    numbers = [ask(narrow, i) for i in range(len(prompt_ids))]
    assert narrow.follow(*(n for n, _ in numbers)) == alone
    s = narrow.engine.stats()
    assert s.preemptions > 0
    assert s.new_tokens == sum(map(len, alone)) == 90 * len(prompt_ids)
    assert all(m.accepted == [e.token for e in narrow.heard[n]] for n, m in numbers if m)
    loose = client(running=6, cache_tokens=320)
    assert loose.follow(*[ask(loose, i)[0] for i in range(len(prompt_ids))]) != alone  # read as prompts: other sums


def test_equal_beginnings_are_computed_once(model, client):
    common, other, third = prompts(150, 20, 9)
    c = client()
    first, second = [*common, *other], [*common, *third]
    assert c.tokens(c.ask(first)) == [alone(model, first)]
    n, m = c.ask(second), c.ask(first)
    assert c.tokens(n, m) == [alone(model, second), alone(model, first)]
    assert c.heard[1][0].cached == 0
    assert (c.heard[n][0].cached, c.heard[m][0].cached) == (128, 128)  # whole blocks
    assert [e.cached for e in c.heard[n][1:]] == [0] * 11
    assert c.engine.stats().prefix_hits == 256
    chat = [*first, *c.tokens(m)[0], *third]  # a conversation that goes on finds its cached turns
    k = c.ask(chat)
    assert c.tokens(k) == [alone(model, chat)]
    assert c.heard[k][0].cached == 128
    whole = prompts(128)[0]  # the last token is always computed, for its logits
    assert c.tokens(c.ask(whole)) == c.tokens(c.ask(whole)) == [alone(model, whole)]


def test_how_a_text_is_drawn_is_decided_once_not_in_every_pass(model, client, monkeypatch):
    """Asked in every pass it was 1.4 ms of the host's for 128 texts, while the device waited."""
    made, check = [], Draw.__post_init__
    monkeypatch.setattr(Draw, "__post_init__", lambda self: (made.append(self), check(self))[1])
    c, counts = client(), []
    for new in (4, 40):
        before = len(made)
        c.follow(*[c.ask(p, new, temperature=0.5) for p in prompts(20, 30)])
        counts.append(len(made) - before)
    assert counts[0] == counts[1] > 0


def test_stop_ids_end_a_text(model, client):
    prompt = prompts(20)[0]
    expected = alone(model, prompt, 30)
    stop = expected[9]
    c = client()
    n, m = c.ask(prompt, 30, stop=[stop, 5]), c.ask(prompt, 1)
    cut = expected[: expected.index(stop) + 1]
    assert c.tokens(n, m) == [cut, expected[:1]]
    assert [c.heard[i][-1].finish_reason for i in (n, m)] == ["stop", "length"]


def test_cancelled_requests_end_and_the_others_do_not_notice(model, client):
    prompt_ids = prompts(*(20 + i for i in range(9)))
    expected = [alone(model, p, 60) for p in prompt_ids]
    c = client(running=4)
    numbers = [c.ask(p, 60) for p in prompt_ids]
    for n in numbers[1::3]:  # some run, some wait
        c.engine.cancel(n)
    c.engine.cancel(999)
    while len(c.heard.get(numbers[0], ())) < 5:
        c.hear()
    c.engine.cancel(numbers[3])
    for i, (events, want) in enumerate(zip(c.follow(*numbers), expected, strict=True)):
        result = [e.token for e in events if e.token is not None]
        assert events[-1].finish_reason == ("cancelled" if i in (1, 3, 4, 7) else "length")
        assert result == want[: len(result)]
        assert i in (1, 3, 4, 7) or len(result) == 60
    c.engine.cancel(numbers[0])  # over already
    again = c.ask(prompt_ids[0], 60)
    assert c.tokens(again) == [expected[0]]
    assert c.events.empty()


def test_samples_of_a_seed_do_not_depend_on_other_requests(model, client):
    prompt, *others = prompts(40, 9, 100, 33)
    how = {"temperature": 1.0, "seed": 12345}
    alone_drawn = Client(model)
    expected = alone_drawn.tokens(alone_drawn.ask(prompt, 20, **how))
    c = client(running=4)
    busy = [c.ask(p, 25, temperature=0.7, seed=i) for i, p in enumerate(others)]
    n, other_seed = c.ask(prompt, 20, **how), c.ask(prompt, 20, temperature=1.0, seed=12346)
    assert c.tokens(n) == expected
    assert c.tokens(other_seed) != expected
    assert len({tuple(t) for t in c.tokens(*busy)}) == 3
    small = client(running=4, cache_tokens=128)  # nor on being put back
    texts = [small.ask(p, 40, **how) for p in (prompt, others[0], others[2])]
    small.follow(*texts)
    assert small.tokens(texts[0])[0][:20] == expected[0]
    alone_drawn.engine.stop(0)


def test_unanswerable_requests_are_reported_and_a_full_queue_is_busy(model, client):
    c = client(running=1, waiting=1, cache_tokens=256)
    assert c.engine.limits.longest == 256
    for prompt, n in (([], 5), ([3], 0), ([3] * 200, 57), ([320], 5), ([-1], 5)):
        with pytest.raises(UsageError):
            c.ask(prompt, n)
    with pytest.raises(UsageError):
        c.ask([3], 5, logit_bias={320: 1.0})
    with pytest.raises(UsageError, match="--max-batch 5000 must be from 1 to 1024"):
        client(running=5000)
    with pytest.raises(Busy, match="1 requests wait already"):
        [c.ask([3], 250) for _ in range(9)]
    c.engine.stop(0)
    with pytest.raises(UnsupportedError, match="stopping"):
        c.ask([3], 5)
    assert {events[-1].finish_reason for events in c.follow(1)} <= {"cancelled", "length"}


def test_an_error_ends_all_requests_and_is_reported(model, client, monkeypatch):
    c = client()
    monkeypatch.setattr(c.engine.passes, "forward", lambda *a: (_ for _ in ()).throw(RuntimeError("the device\nis gone")))
    n, m = c.ask([3], 5), c.ask([4], 5)
    for events in c.follow(n, m):
        assert events[-1].finish_reason == "error"
        assert "the device" in events[-1].message
        assert "\n" not in events[-1].message
    with pytest.raises(UnsupportedError, match="the device"):
        c.ask([3], 5)


def test_nan_logits_end_one_answer_and_the_others_go_on(model, client, monkeypatch):
    """Before, every sample was token 0 and was sent as the answer; log-probabilities were NaN, which is not JSON."""
    c = client()
    plan, embed = c.engine.passes.plan, c.engine.passes.plan.embed
    monkeypatch.setattr(plan, "embed", lambda ids: embed(ids).masked_fill((ids == 311)[:, None], float("nan")))
    n, m = c.ask([5, 311], 5), c.ask([3], 5)
    ill, well = c.follow(n, m)
    assert [e.finish_reason for e in ill] == ["error"]
    assert "is NaN or infinite" in ill[0].message
    assert [e.finish_reason for e in well] == [None] * 4 + ["length"]


def test_stop_lets_running_requests_finish(model, client):
    c = client(running=2)
    prompt = prompts(10)[0]
    numbers = [c.ask(prompt, 20) for _ in range(5)]
    c.engine.stop(60)
    assert c.tokens(*numbers) == [alone(model, prompt, 20)] * 5
