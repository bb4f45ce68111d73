"""Every field with every number: an answer, or one line that names the field; never a server that has ended."""

import json
import math

import pytest
import torch
from asking import build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saying import byte_tokenizer, posts, served_by

from lowq_cli.engine import stream
from lowq_cli.engine.ranges import ranges
from lowq_cli.engine.sampling import Sampling
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.http import fields
from lowq_cli.serving.request import Draw, Request
from lowq_cli.serving.sampler_reference import Picker
from lowq_packers.errors import UsageError

EDGES = [0, -1, 1, 2, 1e-45, 1e-46, 1e-300, 5e-324, 3.4e38, 3.5e38, 1e39, 1e300, 1e308, 0.999999999, 1 - 1e-9, -0.0]
EDGES += [s * (1 << b) + d for b in (15, 16, 24, 31, 32, 53, 63, 64, 127, 1000) for d in (-513, -1, 0, 1) for s in (1, -1)]
NUMBERS = st.one_of(st.sampled_from(EDGES), st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.floats(0, 2))
OTHER = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.just([]), st.just({}))
NUMERIC = [*fields.SAMPLING, "max_tokens", "n", "logprobs", "best_of"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def values(name):
    if name == "logit_bias":
        return st.dictionaries(
            st.one_of(st.sampled_from(["0", "5", "319", "320", "-1", "x", str(1 << 63)])), NUMBERS, max_size=3
        )
    return NUMBERS


BODIES = st.fixed_dictionaries({}, optional={name: st.one_of(values(name), values(name), OTHER) for name in NUMERIC})
CHAT_FIELDS = (*fields.SAMPLING, "max_tokens", "max_completion_tokens", "top_logprobs", "n")
CHATS = st.fixed_dictionaries({}, optional={name: values(name) for name in CHAT_FIELDS})


@pytest.fixture(scope="module")
def model():
    return build("llama")


def inside(settings_, name, value):
    r = ranges(settings_)[name]
    return not (r.whole and isinstance(value, float)) and (value == r.apart or r.least <= value <= r.most)


def asked(model, requests):
    """All through one server; whether its engine still answers afterwards is the last of them."""
    engine = engine_of(model, 200)
    served = served_by(engine, byte_tokenizer(template=TEMPLATE))
    try:
        *result, last = posts(served, *requests, ("completions", {"prompt": "x", "max_tokens": 1}))
        assert last[0] == 200, last
        assert not engine.closed
        return result
    finally:
        engine.stop(0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies=st.lists(BODIES, min_size=8, max_size=8), chats=st.lists(CHATS, min_size=4, max_size=4))
def test_any_number_in_any_field_is_answered_or_refused_by_name(model, bodies, chats):
    requests = [("completions", {"prompt": "x", "max_tokens": 2} | b | {"n": b.get("n", 1)}) for b in bodies]
    hello = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True}
    requests += [("chat/completions", hello | c) for c in chats]
    requests = [
        (path, body | {"stop": [" "]}) for path, body in requests if (body.get("n") or 1) in (None, 1, 2, 0, -1, 1 << 63)
    ]
    for (_, body), (status, answer) in zip(requests, asked(model, requests), strict=True):
        if status == 200:
            assert len(answer["choices"]) == (body.get("n") or 1)
            assert answer["usage"]["completion_tokens"] <= 512 * len(answer["choices"])
            continue
        assert status == 400, answer
        line = answer["error"]["message"]
        assert "\n" not in line
        assert answer["error"]["param"] in (*NUMERIC, "max_completion_tokens", "top_logprobs") or "token id" in line, answer


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(list(ranges(Draw))), value=NUMBERS)
def test_a_range_is_that_of_draws(name, value):
    """What a range lets through can be drawn with by the definition; what is outside is refused by name."""
    how = {"temperature": 1.0} | {name: value} | ({} if name == "seed" else {"seed": 7})
    if not inside(Draw, name, value):
        with pytest.raises(UsageError, match=f"^{name}="):
            Draw(**how)
        return
    draw = Draw(**how)
    logits = torch.linspace(-3, 3, 40)[None].clone()
    logits[0, 17] = 9.0
    token = int(Picker(draw, None, [1], 40, torch.device("cpu")).pick(logits))
    if (name in ("top_p",) and value < 0.5) or (name == "temperature" and value < 0.1) or (name == "top_k" and value == 1):
        assert token == 17


@pytest.mark.parametrize("top_p", [0, 5e-324, 1e-46, 1e-45, 1e-38, 1e-9])
@pytest.mark.parametrize("path", ["generate", "server"])
def test_however_small_top_p_is_the_likeliest_token_stays(model, top_p, path):
    tokenizer, body = byte_tokenizer(), {"prompt": "once", "max_tokens": 6, "seed": 1, "ignore_eos": True}
    expected = stream(model, tokenizer, "once", max_new_tokens=6)
    list(expected)
    if path == "generate":
        result = stream(model, tokenizer, "once", max_new_tokens=6, temperature=1.0, top_p=top_p, seed=1)
        list(result)
        assert result.tokens == expected.tokens
        return
    greedy, drawn = asked(model, [("completions", body | {"temperature": 0}), ("completions", body | {"top_p": top_p})])
    assert drawn[1]["choices"][0]["text"] == greedy[1]["choices"][0]["text"]


@pytest.mark.parametrize("top_k", [1 << 24, (1 << 31) - 1, (1 << 63) - 513, (1 << 63) - 1])
def test_a_top_k_beyond_the_vocabulary_is_all_of_it(model, top_k):
    body = {"prompt": "once", "max_tokens": 6, "seed": 1}
    free, all_of_it = asked(model, [("completions", body), ("completions", body | {"top_k": top_k})])
    assert all_of_it[1]["choices"] == free[1]["choices"]


@settings(max_examples=150, deadline=None)
@given(how=st.fixed_dictionaries({}, optional=dict.fromkeys(ranges(Sampling), NUMBERS)))
def test_generate_draws_with_any_setting_or_refuses_it_by_name(model, how):
    wrong = [name for name in how if not inside(Sampling, name, how[name])]
    if wrong:
        with pytest.raises(UsageError, match=rf"^({'|'.join(wrong)})="):
            stream(model, byte_tokenizer(), "x", max_new_tokens=2, **how)
        return
    g = stream(model, byte_tokenizer(), "x", max_new_tokens=2, **how)
    list(g)
    assert all(0 <= t < 320 for t in g.tokens[0])


@pytest.mark.parametrize(
    "body", [{"max_tokens": 0}, {"max_tokens": 0, "echo": True}, {"max_tokens": 0, "n": 2, "stream": True}], ids=str
)
def test_no_tokens_at_all(model, body):
    ((status, answer),) = asked(model, [("completions", {"prompt": "once"} | body)])
    parts = answer if body.get("stream") else [answer]
    assert status == 200
    choices = [c for a in parts for c in a["choices"]]
    assert "".join(c["text"] for c in choices) == ("once" if body.get("echo") else "")
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"] * body.get("n", 1)


@pytest.mark.parametrize("ids", [[1 << 40], [-1], [320], [[5], [1 << 62]]], ids=str)
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_that_the_model_has_not_are_refused_before_they_are_decoded(model, ids, echo):
    ((status, answer),) = asked(model, [("completions", {"prompt": ids, "echo": echo, "max_tokens": 2})])
    assert status == 400
    assert "token id" in answer["error"]["message"]


def test_many_prompts_are_refused_before_they_are_read(model):
    raw = json.dumps({"prompt": ["x"] * 400_000, "max_tokens": 1})
    ((status, answer),) = asked(model, [("completions", raw.encode())])
    assert (status, answer["error"]["param"]) == (400, "n")


def test_numbers_that_json_does_not_have():
    for word in ("NaN", "Infinity", "1e999", "9" * 5000):
        with pytest.raises(fields.Refusal) as refused:
            fields.read(fields.parsed(b'{"prompt": "x", "temperature": %s}' % word.encode()), chat=False)
        assert refused.value.status == 400
    assert math.isinf(float("1e999"))
    with pytest.raises(UsageError):
        Request((1,), 2, draw=Draw(top_p=math.nan))
