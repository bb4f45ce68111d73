"""Whatever numbers a model computes or writes, and a client sends, the server's answers and the commands' are JSON."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saying import opened, served_by, strict
from talking import TEMPLATE, Heard

from lowq_cli import console
from lowq_cli.serving.http.answers import encoded, event
from lowq_cli.serving.request import Event

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=9
)


def finite(value):
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@settings(max_examples=60, deadline=None)
@given(value=VALUES)
def test_what_is_encoded_is_json_with_null_for_numbers_that_are_not_finite(value):
    whole = [finite(value), None]
    assert strict(encoded([value, math.nan])) == whole
    assert strict(event([value, math.inf]).removeprefix(b"data: ")) == whole
    assert strict(console.to_json([value, -math.inf])) == whole


class Unlikely(Heard):
    """Says a text whose tokens and their alternatives, and those of a prompt, have no probability at all."""

    vocabulary = 320

    def submit(self, request):
        self.number += 1
        some = (-math.inf, ((3, -math.inf), (4, -0.5)))
        if request.read is not None:
            read = [some] * (len(request.prompt) - 1)
            self.sink([(self.number, Event(finish_reason="stop", read=read))])
            return self.number
        for i, token in enumerate(self.tokens, 1):
            logprob, top = some if request.draw.logprobs is not None else (None, ())
            finish = "stop" if i == len(self.tokens) else None
            self.sink([(self.number, Event(token, logprob, top, finish_reason=finish))])
        return self.number


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "number"}}}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}
ASKED = {
    "chat/completions": CHAT | TOOLS | {"logprobs": True, "top_logprobs": 2},
    "completions": {"prompt": "xyz", "max_tokens": 200, "logprobs": 2, "echo": True},
    "responses": {"input": "x", "tools": [{"type": "function", **TOOL}], "metadata": {"a": [1e999]}},
    "messages": CHAT | {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]},
    "/api/chat": CHAT | TOOLS,
}
CALLS = {
    "JSON of the model": '<tool_call>\n{"name": "f", "arguments": {"n": NaN, "m": [1e999, -Infinity]}}\n</tool_call>',
    "an element": "<tool_call>\n<function=f>\n<parameter=n>\nNaN\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("syntax", CALLS)
@pytest.mark.parametrize("path", ASKED)
def test_every_dialect_answers_in_json(path, syntax, stream):
    """`opened` reads each answer and each event strictly; 1e999 in a body is an infinity for us."""
    shown = "{% if false %}<function={% endif %}" if syntax == "an element" else ""
    engine = Unlikely(CALLS[syntax], template=TEMPLATE + shown)
    body = json.dumps(ASKED[path] | {"stream": stream}).replace("Infinity", "1e999").encode()
    with opened(served_by(engine, engine.tokenizer)) as ask:
        status, answer = ask(path, body)
    assert status == 200
    text = json.dumps(answer)
    assert path == "completions" or '"f"' in text
    assert "-9999.0" in text or "completions" not in path
