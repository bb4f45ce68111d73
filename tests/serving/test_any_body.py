"""Whatever a body holds, each dialect answers it or refuses it in one line, in its own shape."""

import asyncio
import json

import httpx
from broken_requests import BODIES, shape_fault
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saying import served_by
from talking import Heard

from lowq_cli.serving.http import fields
from lowq_cli.serving.http.app import make_app

KEYS = [
    "add_special_tokens",
    "arguments",
    "budget_tokens",
    "call_id",
    "choice",
    "content",
    "data",
    "dimensions",
    "disable_parallel_tool_use",
    "documents",
    "effort",
    "encoding_format",
    "format",
    "function",
    "guided_choice",
    "guided_regex",
    "id",
    "image_url",
    "images",
    "input",
    "input_schema",
    "instructions",
    "json",
    "keep_alive",
    "max_output_tokens",
    "media_type",
    "mirostat",
    "n_predict",
    "name",
    "num_predict",
    "options",
    "output",
    "output_config",
    "pooling",
    "previous_response_id",
    "query",
    "raw",
    "reasoning",
    "regex",
    "return_token_strs",
    "role",
    "schema",
    "source",
    "stop_sequences",
    "structured_outputs",
    "summary",
    "system",
    "text",
    "think",
    "thinking",
    "tokens",
    "tool_calls",
    "tool_use_id",
    "top_n",
    "truncate",
    "type",
    "url",
    "with_pieces",
    "x",
]
KEYS = sorted({*KEYS, *fields.CHAT, *fields.COMPLETION})
WORDS = [
    "user",
    "assistant",
    "system",
    "tool",
    "function",
    "text",
    "input_text",
    "output_text",
    "image_url",
    "input_image",
    "image",
    "none",
    "auto",
    "required",
    "any",
    "enabled",
    "disabled",
    "adaptive",
    "json_schema",
    "json_object",
    "message",
    "function_call",
    "reasoning",
    "function_call_output",
    "tool_use",
    "tool_result",
    "base64",
    "custom",
    "web_search",
    "m",
    "f",
    "é",
    "{}",
    "[",
    "high",
    "last",
]
NUMBERS = st.one_of(st.integers(-2, 1 << 40), st.floats(allow_nan=False, allow_infinity=False))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from([*WORDS, ""]))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)


def places(value, at=()):
    """Every place in a JSON value."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*at, key))


def replaced(value, at, new):
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@st.composite
def bodies(draw):
    path = draw(st.sampled_from(sorted(BODIES)))
    body = draw(st.sampled_from(BODIES[path]))
    for _ in range(draw(st.integers(1, 2))):
        if isinstance(body, dict) and draw(st.booleans()):
            body = body | {draw(st.sampled_from(KEYS)): draw(JSON)}
        else:
            body = replaced(body, draw(st.sampled_from(list(places(body)))), draw(JSON))
    return path, body


class Told(Heard):
    """Says what is asked of prompts, too."""

    def submit(self, request):
        from lowq_cli.serving.request import Event

        if request.read is None:
            return super().submit(request)
        self.number += 1
        likely = [(-1.0, ((3, -0.5),))] * len(request.prompt)
        read = [0.5] * 8 if request.read.kind == "hidden" else likely[:1] if request.read.kind == "next" else likely[1:]
        self.sink([(self.number, Event(finish_reason="stop", read=read))])
        return self.number


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=st.lists(bodies(), min_size=40, max_size=40))
def test_any_body_is_answered_or_refused(asked):
    result = []

    async def run():
        engine = Told('<think>hm</think>x<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        served = served_by(engine, engine.tokenizer)
        await served.models.start(lambda n, of: None)
        transport = httpx.ASGITransport(app=make_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            for path, body in asked:
                result.append((path, body, await client.post(path, content=json.dumps(body).encode())))

    asyncio.run(run())
    for path, body, answer in result:
        assert answer.status_code in (200, 400, 404, 413, 429), (path, body, answer.status_code, answer.text)
        assert "internal error" not in answer.text, (path, body, answer.text)
        if answer.status_code != 200:
            assert shape_fault(path, answer.json()) == "", (path, body)
