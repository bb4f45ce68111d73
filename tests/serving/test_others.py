"""Fields that clients of other servers send: those with a meaning, those without, those that are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saying import message, posts, served_by
from talking import Heard

from lowq_cli.serving.http import fields
from lowq_cli.serving.http.foreign_fields import FORMS, HARMLESS, NEUTRAL, RENAMED, WITH
from lowq_cli.serving.http.grammar import Grammars
from lowq_cli.serving.http.refusal import Refusal

CHAT = {"messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize("chat", [True, False])
def test_fields_without_a_meaning_are_left_out_by_name(chat):
    body = CHAT if chat else {"prompt": "x"}
    plain = fields.read(dict(body), chat)
    for name in HARMLESS | set(WITH):
        result = fields.read(body | {name: 3}, chat)
        assert (result.given, result.draw, result.left_out) == (plain.given, plain.draw, (name,))
        assert name in result.ignored


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_would_change_the_answer_are_refused_unless_they_do_not(name):
    for value in NEUTRAL[name]:
        assert fields.read(CHAT | {name: value}, True).left_out == (name,)
    with pytest.raises(Refusal, match=name):
        fields.read(CHAT | {name: "something else"}, True)


def test_other_names_mean_the_same():
    result = fields.read(CHAT | {"repeat_penalty": 1.5, "n_predict": 7, "thinking_budget": 9}, True)
    assert (result.draw["repetition_penalty"], result.max_tokens, result.thinking) == (1.5, 7, 9)
    assert fields.read({"prompt": "x", "n_predict": -1}, False).max_tokens is None
    assert not set(RENAMED) & (set(fields.CHAT) | HARMLESS | set(NEUTRAL))
    assert not (HARMLESS | set(NEUTRAL) | set(WITH) | set(FORMS)) & (set(fields.CHAT) | set(fields.COMPLETION))


@settings(max_examples=50, deadline=None)
@given(name=st.text(max_size=90), value=st.one_of(st.integers(), st.text(max_size=3), st.none(), st.lists(st.booleans())))
def test_an_unknown_field_is_named_in_one_line(name, value):
    if name in {**fields.CHAT, **RENAMED, **NEUTRAL, **WITH, **dict.fromkeys((*HARMLESS, *FORMS))}:
        return
    result = fields.read(CHAT | {name: value}, True)
    assert result.unknown == (name,)
    assert "\n" not in result.ignored
    with pytest.raises(Refusal, match="unknown field"):
        result.check_known()


def test_unknown_fields_are_refused_by_a_strict_server_alone():
    lines = []
    for strict in (False, True):
        engine = Heard("Yes.")
        served = served_by(engine, engine.tokenizer, strict=strict, log=lines.append)
        ((status, answer),) = posts(served, ("chat/completions", CHAT | {"temprature": 1}))
        assert status == (400 if strict else 200)
        if strict:
            assert answer["error"]["message"] == 'unknown field "temprature"; did you mean temperature?'
    assert 'ignored "temprature"; did you mean temperature?' in lines[0]


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (0, 3), (4, 0), (4, 3)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_the_log_says_how_many_drafts_were_right(n, stream, right, wrong):
    engine, lines = Heard("Yes."), []
    engine.drafted = right, wrong
    ((status, _),) = posts(
        served_by(engine, engine.tokenizer, log=lines.append), ("chat/completions", CHAT | {"stream": stream, "n": n})
    )
    assert status == 200
    assert (f", {n * right} of {n * (right + wrong)} drafts right, " in lines[0]) == (right + wrong > 0)
    assert ("drafts" in lines[0]) == (right + wrong > 0)


def one(body, text="a<x>b", special=(), path="chat/completions"):
    engine = Heard(text, special)
    ((status, answer),) = posts(served_by(engine, engine.tokenizer), (path, (CHAT if "chat" in path else {}) | body))
    return status, answer, engine


def test_special_tokens_are_shown_where_that_is_asked():
    assert message(one({}, special=("<x>",))[1])[0] == "ab"
    assert message(one({"skip_special_tokens": False}, special=("<x>",))[1])[0] == "a<x>b"


def test_token_ids_end_an_answer():
    _, answer, _ = one({"stop_token_ids": [Heard("b").tokens[0]]}, "ab")
    assert message(answer) == ("a", [], "stop")
    assert one({"stop_token_ids": [1 << 40]})[0] == 400


@pytest.mark.parametrize(
    ("body", "right", "wrong"),
    [
        ({"guided_json": SCHEMA}, '{"x": 3}', '{"y": 3}'),
        ({"guided_regex": "[ab]+/c"}, "ab/c", "abc"),
        ({"guided_choice": ["yes", 'n"o']}, 'n"o', "now"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "never"),
        ({"structured_outputs": {"regex": "[0-9]{2}"}}, "12", "1x"),
    ],
    ids=lambda v: str(v)[:30],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_forms_under_other_names(body, right, wrong, path):
    pytest.importorskip("llguidance", reason="forms need the extra lowq[grammar]")
    more = {"reasoning_effort": "none"} if "chat" in path else {"prompt": "x"}
    status, answer, engine = one(body | more, path=path)
    assert status == 200, answer
    mask = engine.requests[0].mask
    again = grammars(engine).mask(mask.recipe)
    assert passes(engine, mask, right)
    assert not passes(engine, again, wrong)


def grammars(engine):
    return Grammars(engine.tokenizer, frozenset([engine.tokenizer.eos_token_id]), engine.vocabulary)


def passes(engine, mask, text):
    for token in engine.tokenizer(text, add_special_tokens=False)["input_ids"]:
        words = np.zeros(-(-engine.vocabulary // 32), np.int32)
        mask.fill(words)
        if not words[token // 32] >> token % 32 & 1:
            return False
        mask.accept(token)
    return True


class Following(Heard):
    """Says its tokens as far as the mask lets it, and else the one token that it has to."""

    def submit(self, request):
        output, left = [], list(self.tokens)
        while left and len(output) < request.max_tokens:
            words = np.zeros(-(-self.vocabulary // 32), np.int32)
            request.mask.fill(words)
            token = left[0]
            if words[token // 32] >> token % 32 & 1:
                left.pop(0)
            else:
                token = next((t for t in range(self.vocabulary) if (words[t // 32] >> t % 32) & 1), None)
            request.mask.accept(token)
            output.append(token)
            if token in request.stop_ids:
                break
        self.tokens = output
        return super().submit(request)


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["text", "tokens"])
@pytest.mark.parametrize("budget", [1, 4, 40])
def test_thoughts_end_when_their_budget_is_used_up(special, budget):
    output = "<think>" + "u" * 20 + ("" if budget < 20 else "</think>\n\nYes.")
    engine = Following(output, special)
    ((status, answer),) = posts(
        served_by(engine, engine.tokenizer), ("chat/completions", CHAT | {"thinking_token_budget": budget, "max_tokens": 80})
    )
    assert status == 200, answer
    whole = answer["choices"][0]["message"]
    thoughts = min(20, budget - 1)  # the token that opens them counts
    assert whole.get("reasoning_content", "") == "u" * thoughts
    assert whole["content"] == ("Yes." if budget > 20 else "u" * (20 - thoughts))


def test_an_answer_has_at_least_so_many_tokens():
    engine = Following("ab")
    ((status, answer),) = posts(
        served_by(engine, engine.tokenizer), ("chat/completions", CHAT | {"min_tokens": 5, "max_tokens": 5})
    )
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
