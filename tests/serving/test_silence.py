"""Streams that have nothing to send for a while: each path's event without content, and what its clients make of it."""

import asyncio
import json
import threading
import time
from itertools import groupby

import httpx
import pytest
from saying import served_by
from talking import Heard, running

from lowq_cli.serving.http.app import make_app
from lowq_cli.serving.request import Event

TEXT, SILENT_S = "Yes.", 0.6
CALL = '<tool_call>\n{"name": "f", "arguments": {"input": "x"}}\n</tool_call>'
TOOL = {"name": "f", "description": "d"}
SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}}
FUNCTION = [{"type": "function", "function": TOOL | {"parameters": SCHEMA}}]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 200}
COMMENT, KEEPALIVE, PING = ": waiting", '{"type":"keepalive"', 'event: ping\ndata: {"type":"ping"}'
PATHS = {  # path -> (body, body with a tool, event without content, end of the stream)
    "/v1/chat/completions": (CHAT, CHAT | {"tools": FUNCTION}, COMMENT, "data: [DONE]"),
    "/v1/completions": ({"model": "m", "prompt": "x", "stream": True}, None, COMMENT, "data: [DONE]"),
    "/v1/responses": (
        {"model": "m", "input": "x", "stream": True},
        {"model": "m", "input": "x", "stream": True, "tools": [TOOL | {"type": "custom"}]},
        KEEPALIVE,
        '"type":"response.completed"',
    ),
    "/v1/messages": (CHAT, CHAT | {"tools": [TOOL | {"input_schema": SCHEMA}]}, PING, '{"type":"message_stop"}'),
    "/api/chat": (CHAT, CHAT | {"tools": FUNCTION}, '"content":""},"done":false}', '"done":true'),
    "/api/generate": ({"model": "m", "prompt": "x"}, None, '"response":"","done":false}', '"done":true'),
}


class Halting(Heard):
    """Says a text from another thread, and waits before the token at one place."""

    def __init__(self, text, at=0):
        super().__init__(text)
        self.at = at

    def submit(self, request):
        self.number += 1
        number = self.number

        def say():
            for i, token in enumerate(self.tokens):
                if i == self.at:
                    time.sleep(SILENT_S)
                self.sink([(number, Event(token, finish_reason="stop" if token in request.stop_ids else None))])

        threading.Thread(target=say).start()
        return number


def streamed(engine, path, body, **how):
    with running(engine, **how) as url:
        answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


def cases():
    for path, (body, tools, idle, end) in PATHS.items():
        yield pytest.param(path, body, TEXT, 0, idle, end, id=f"{path} prompt")
        if tools:
            yield pytest.param(path, tools, CALL, len(CALL) - 14, idle, end, id=f"{path} call")


@pytest.mark.parametrize(("path", "body", "text", "at", "idle", "end"), list(cases()))
def test_a_silent_stream_has_events_without_content_and_the_same_answer(path, body, text, at, idle, end):
    """While a prompt is read, and while the end of a call is awaited."""
    silent, talking = streamed(Halting(text, at), path, body, silence_s=0.1), streamed(Halting(text, -1), path, body)
    assert 2 <= silent.count(idle) - talking.count(idle) <= 10 * SILENT_S + 1, silent  # at most one each 0.1 s
    assert end in silent.rpartition(idle)[2], silent
    assert types(silent) == types(talking)
    numbers = [e["sequence_number"] for e in events(silent) if "sequence_number" in e]
    assert numbers == list(range(len(numbers)))


def events(stream):
    """The events of a stream that have a type, as those of Responses and Messages."""
    lines = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return [line for line in lines if "type" in line]


def types(stream):
    """The types of its events with content; how many deltas a text has depends on time."""
    return [kind for kind, _ in groupby(e["type"] for e in events(stream) if e["type"] not in ("keepalive", "ping"))]


def test_openais_and_anthropics_clients_read_a_stream_with_silence():
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    with running(Halting("Yes."), silence_s=0.1) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chunks = client.chat.completions.create(model="m", messages=CHAT["messages"], stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Yes."
        assert "".join(c.choices[0].text for c in client.completions.create(model="m", prompt="x", stream=True)) == "Yes."
        with client.responses.stream(model="m", input="x") as stream:
            types = [e.type for e in stream]
            assert stream.get_final_response().output_text == "Yes."
        assert types.count("keepalive") >= 2
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with client.messages.stream(model="m", max_tokens=9, messages=CHAT["messages"]) as stream:
            assert stream.get_final_text() == "Yes."


def test_a_client_that_does_not_read_gets_no_events_without_content():
    """Its silence is its own: they would pile up in front of the answer."""
    sent = []

    async def ask():
        served = served_by(engine := Heard(TEXT), engine.tokenizer, silence_s=0.05)
        await served.models.start(lambda n, of: None)
        body = [{"type": "http.request", "body": json.dumps(CHAT).encode(), "more_body": False}]

        async def receive():
            return body.pop() if body else await asyncio.sleep(60)

        async def send(event):
            sent.append(event.get("body", b""))
            await asyncio.sleep(0.5 if len(sent) == 3 else 0)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
        await make_app(served)(scope | {"client": ("127.0.0.1", 1)}, receive, send)

    asyncio.run(ask())
    assert TEXT.encode() in b"".join(sent)
    assert not any(part.startswith(b":") for part in sent)
