"""OpenAI's own package, curl and raw sockets against a running `lowq serve`."""

import asyncio
import json
import shutil
import subprocess

import pytest

from lowq_cli.engine import stream
from lowq_cli.engine.open_model import ready

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")

PROMPT = "Once upon a time"
SAID = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": PROMPT}]
RENDERED = "system: Tell stories.\nuser: Once upon a time\nassistant:"


@pytest.fixture(scope="module")
def alone(talk):
    """The greedy text that `lowq generate` makes of a prompt."""
    model, tokenizer = ready(talk, "cpu")

    def one(prompt, tokens):
        g = stream(model, tokenizer, prompt, max_new_tokens=tokens)
        list(g)
        return g.text

    return one


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models(client):
    response = client.models.list().data
    assert [m.id for m in response] == ["talk"]
    assert client.models.retrieve("talk").owned_by == "lowq"
    with pytest.raises(openai.NotFoundError, match='"gpt-4" is not served here; this server has "talk"'):
        client.models.retrieve("gpt-4")


def test_a_completion_is_the_text_of_generate(client, alone):
    response = client.completions.create(model="talk", prompt=PROMPT, temperature=0)
    assert response.choices[0].text == alone(PROMPT, 16)
    assert response.choices[0].finish_reason == "length"
    u = response.usage
    assert (u.prompt_tokens, u.completion_tokens, u.total_tokens) == (5, 16, 21)


def test_a_chat_is_the_text_of_its_template(client, alone):
    response = client.chat.completions.create(model="talk", messages=SAID, temperature=0, max_completion_tokens=12)
    assert response.choices[0].message.content == alone(RENDERED, 12)
    assert response.choices[0].message.role == "assistant"
    parts = [SAID[0], {"role": "user", "content": [{"type": "text", "text": "Once upon "}, {"type": "text", "text": "a time"}]}]
    again = client.chat.completions.create(model="talk", messages=parts, temperature=0, max_tokens=12)
    assert again.choices[0].message.content == response.choices[0].message.content


def test_a_switch_of_the_template_is_passed_on(client, alone):
    how = {"model": "talk", "messages": SAID, "temperature": 0, "max_tokens": 8}
    response = client.chat.completions.create(**how, extra_body={"chat_template_kwargs": {"shout": True}})
    assert response.choices[0].message.content == alone(RENDERED + " LOUD", 8)
    for wrong in ({"whisper": True}, {"messages": []}, {"chat_template": "x"}):
        with pytest.raises(openai.BadRequestError, match="knows no switch"):
            client.chat.completions.create(**how, extra_body={"chat_template_kwargs": wrong})


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_a_stream_is_the_whole_answer_in_pieces(client, chat):
    """And several answers at once stay apart; usage comes last, when asked for."""
    how = {"model": "talk", "temperature": 1.0, "seed": 7, "max_tokens": 14, "n": 3}
    make = client.chat.completions.create if chat else client.completions.create
    how |= {"messages": SAID} if chat else {"prompt": PROMPT}
    whole = make(**how)
    texts, reasons, usage = ["", "", ""], [None] * 3, None
    for chunk in make(**how, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for c in chunk.choices:
            texts[c.index] += (c.delta.content or "") if chat else c.text
            reasons[c.index] = c.finish_reason or reasons[c.index]
    assert texts == [c.message.content if chat else c.text for c in whole.choices]
    assert len(set(texts)) == 3
    assert reasons == [c.finish_reason for c in whole.choices] == ["length"] * 3
    assert usage.completion_tokens == whole.usage.completion_tokens == 42


def test_many_at_once_by_the_async_client(server, alone):
    prompts = [f"{PROMPT} there were {n}" for n in ("two", "three", "four", "five")]

    async def one(client, prompt, streamed):
        how = {"model": "talk", "prompt": prompt, "temperature": 0, "max_tokens": 10}
        if not streamed:
            return (await client.completions.create(**how)).choices[0].text
        return "".join([c.choices[0].text async for c in await client.completions.create(**how, stream=True)])

    async def all_():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, p, s) for p in prompts for s in (False, True)))

    assert asyncio.run(all_()) == [alone(p, 10) for p in prompts for _ in range(2)]


def test_several_prompts_and_token_ids(client, alone):
    prompts = [PROMPT, "The old man"]
    response = client.completions.create(model="talk", prompt=prompts, temperature=0, max_tokens=6)
    assert [c.text for c in response.choices] == [alone(p, 6) for p in prompts]
    ids = client.completions.create(model="talk", prompt=[5, 6, 7], temperature=0, max_tokens=6, echo=True)
    assert ids.choices[0].text.endswith(alone([5, 6, 7], 6))
    assert ids.usage.prompt_tokens == 3


def test_stop_strings_are_no_part_of_the_text(client, alone):
    whole = alone(PROMPT, 16)
    stop = whole[20:24]
    how = {"model": "talk", "prompt": PROMPT, "temperature": 0, "max_tokens": 16, "stop": [stop, "zebra"]}
    response = client.completions.create(**how).choices[0]
    assert (response.text, response.finish_reason) == (whole[: whole.index(stop)], "stop")
    pieces = [c.choices[0] for c in client.completions.create(**how, stream=True)]
    assert "".join(p.text for p in pieces) == response.text
    assert pieces[-1].finish_reason == "stop"


def test_logprobs_of_both_endpoints(client):
    response = client.completions.create(model="talk", prompt=PROMPT, temperature=0, max_tokens=5, logprobs=2).choices[0]
    logs = response.logprobs
    assert "".join(logs.tokens) == response.text
    assert [response.text[o:][: len(t)] for o, t in zip(logs.text_offset, logs.tokens, strict=True)] == logs.tokens
    assert all(max(t.values()) == p for t, p in zip(logs.top_logprobs, logs.token_logprobs, strict=True))
    how = {"model": "talk", "messages": SAID, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    chat = client.chat.completions.create(**how).choices[0]
    assert "".join(t.token for t in chat.logprobs.content) == chat.message.content
    assert bytes(b for t in chat.logprobs.content for b in t.bytes).decode() == chat.message.content
    assert [len(t.top_logprobs) for t in chat.logprobs.content] == [3] * 5
    streamed = [c.choices[0] for c in client.chat.completions.create(**how, stream=True)]
    assert [t for c in streamed if c.logprobs for t in c.logprobs.content] == chat.logprobs.content


@pytest.mark.parametrize("wanted", [{"top_logprobs": 3}, {"top_logprobs": 3, "include": ["message.output_text.logprobs"]}])
def test_logprobs_of_responses_are_those_of_chats(client, wanted):
    how = {"model": "talk", "temperature": 0}
    chat = client.chat.completions.create(messages=SAID, max_tokens=5, logprobs=True, top_logprobs=3, **how)
    expected = [t.model_dump() for t in chat.choices[0].logprobs.content]
    how |= {"input": SAID, "max_output_tokens": 5} | wanted
    (item,) = client.responses.create(**how).output
    assert [t.model_dump() for t in item.content[0].logprobs] == expected
    events = [*client.responses.create(**how, stream=True)]
    deltas = [t.logprob for e in events if e.type == "response.output_text.delta" for t in e.logprobs]
    assert deltas == [t["logprob"] for t in expected]
    (last,) = [e for e in events if e.type == "response.content_part.done"]
    assert [t.model_dump() for t in last.part.logprobs] == expected


def test_logprobs_of_responses_are_absent_unless_asked_for(client):
    (item,) = client.responses.create(model="talk", input=SAID, max_output_tokens=5).output
    assert item.content[0].logprobs == []
    include = ["message.output_text.logprobs"]
    (item,) = client.responses.create(model="talk", input=SAID, max_output_tokens=5, include=include).output
    assert [t.top_logprobs for t in item.content[0].logprobs] == [[]] * 5


@pytest.mark.parametrize("kind", ["chat", "generate", "raw"])
def test_logprobs_of_ollamas_client(client, server, kind):
    ollama = pytest.importorskip("ollama", reason="ollama's own package is not installed")
    said, options = SAID[-1]["content"], {"temperature": 0, "num_predict": 5}
    chat = client.chat.completions.create(
        model="talk", messages=SAID, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    expected = [t.logprob for t in chat.choices[0].logprobs.content]
    what = {
        "chat": {"messages": SAID},
        "generate": {"prompt": said, "system": SAID[0]["content"]},
        "raw": {"prompt": RENDERED, "raw": True},
    }[kind]
    ask = getattr(ollama.Client(server.url), "chat" if kind == "chat" else "generate")
    how = {"model": "talk", "options": options, **what}
    answer = ask(**how, logprobs=True, top_logprobs=2)
    assert [t.logprob for t in answer.logprobs] == expected
    assert [len(t.top_logprobs) for t in answer.logprobs] == [2] * 5
    assert [t.logprob for part in ask(**how, logprobs=True, stream=True) for t in part.logprobs or []] == expected
    assert ask(**how).logprobs is None


def test_settings_change_the_text(client):
    how = {"model": "talk", "prompt": "The cat and the cat and the cat and", "temperature": 0, "max_tokens": 30}
    plain = client.completions.create(**how)
    first = client.completions.create(**how, logprobs=0).choices[0].logprobs.tokens[0]
    ids = client.completions.create(**how, extra_body={"top_k": 1}, seed=3)
    assert ids.choices[0].text == plain.choices[0].text
    penal = client.completions.create(**how, frequency_penalty=2.0, presence_penalty=2.0)
    assert penal.choices[0].text != plain.choices[0].text
    bias = client.completions.create(**how, logit_bias={"264": 100})
    assert len(set(bias.choices[0].text.split())) == 1
    assert not bias.choices[0].text.startswith(first)
    drawn = [client.completions.create(**how | {"temperature": 1.5}, seed=s).choices[0].text for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


WRONG = [
    ({"temperature": "hot"}, 'temperature: must be a number, not "hot"'),
    ({"temperature": -1}, "temperature=-1.0 must be from 0 to 2"),
    ({"temperature": 2.5}, "temperature=2.5 must be from 0 to 2"),
    ({"top_p": 2}, "top_p=2.0 must be from 0 to 1"),
    ({"n": 0}, "n=0 must be a whole number from 1 to 128"),
    ({"n": 999}, "n=999 must be a whole number from 1 to 128"),
    ({"n": 9, "prompt": ["x"] * 111}, "999 answers were asked for"),
    ({"n": True}, "n: must be a whole number, not true"),
    ({"stop": [""]}, "none of them empty"),
    ({"logit_bias": {"\u0663": 1}}, "names tokens by their ids"),
    ({"logit_bias": {"x": 1}}, 'names tokens by their ids, not "x"'),
    ({"logit_bias": {"99999": 1}}, "token id 99999 is not one of the model's ids, 0 to 8191"),
    ({"prompt": [1, 99999]}, "token id 99999 is not one of the model's ids, 0 to 8191"),
    ({"prompt": []}, "prompt: must be an array that is not empty, not an empty array"),
    ({"prompt": {}}, "prompt: must be an array"),
    ({"prompt": [[1], "x", 3]}, "prompt: must be a text, not 3"),
    ({"prompt": "\ud800"}, "half a surrogate pair"),
    ({"prompt": "word " * 2000}, "maximum context length is 1024 tokens"),
    ({"prompt": [1] * 1024}, "prompt is too long: 1024 tokens > 1023 tokens"),
    ({"prompt": "word " * 200000}, "prompt is too long: 1000000 characters > 1023 tokens"),
    ({"logprobs": 99}, "logprobs=99 must be a whole number from 0 to 20"),
    ({"suffix": "."}, "suffix: "),
    ({"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"model": "gpt-4\ud800"}, "half a surrogate pair"),
]


@pytest.mark.parametrize(("change", "line"), WRONG, ids=lambda v: v[:20] if isinstance(v, str) else "")
def test_errors_have_openais_shape(server, change, line):
    response = server.post("completions", {"prompt": PROMPT} | change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert line in error["message"]
    assert error["param"] in (None, "prompt", *change, "stream_options.include_usag")


WRONG_CHAT = [
    ({"messages": "hi"}, "messages: must be an array"),
    ({"messages": ["hi"]}, "messages[0]: must be an object"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role: must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: is needed"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url: must be an object"),
    ({"top_logprobs": 2}, "needs logprobs: true"),
    ({"functions": [{}]}, "functions: "),
    ({}, "messages: is needed"),
]


@pytest.mark.parametrize(("body", "line"), WRONG_CHAT, ids=lambda v: v[:20] if isinstance(v, str) else "")
def test_invalid_messages_are_refused(server, body, line):
    response = server.post("chat/completions", body)
    assert response.status_code == 400
    assert line in response.json()["error"]["message"] or "messages" not in body


RAW = [
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b'{"prompt": "\xff"}', 400, "not UTF-8: byte 12 is 0xff"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "NaN is not a number"),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "must be a number"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    (b'{"prompt": ' + b"[" * 100000, 400, "nested too deeply"),
    (b'{"prompt": "' + b"x" * (10 << 20) + b'"}', 413, "larger than 4 MiB"),
]


@pytest.mark.parametrize(("raw", "status", "line"), RAW, ids=lambda v: str(v)[:20])
def test_invalid_bodies_are_refused(server, raw, status, line):
    response = server.post("completions", raw)
    assert (response.status_code, line in response.json()["error"]["message"]) == (status, True), response.text


def test_paths_and_methods_that_are_not_served(server):
    import httpx

    for method, path, status in [("GET", "/v1/images", 404), ("GET", "/v1/completions", 405), ("POST", "/", 405)]:
        result = httpx.request(method, server.url + path)
        assert result.status_code == status
        assert path in result.json()["error"]["message"]


def test_curl_as_it_is_printed(server):
    """The lines that the server says to try; 80 columns do not break them, which inside a text would leave no JSON."""
    if not shutil.which("curl"):
        pytest.skip("there is no curl here")
    at = next(i for i, s in enumerate(server.said) if s.startswith("try: "))
    assert max(map(len, server.said[at : at + 2])) <= 80
    line = "".join(server.said[at : at + 2]).removeprefix("try: ")
    done = subprocess.run(["sh", "-c", line.strip() + " -s"], capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_the_metrics_count_requests_and_tokens(server):
    import httpx

    server.post("completions", {"prompt": PROMPT, "max_tokens": 3})
    page = httpx.get(f"{server.url}/metrics").text
    rows = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(rows['lowq_generation_tokens_total{model="talk"}']) >= 3
    assert float(rows['lowq_requests_total{model="talk",outcome="ok"}']) >= 1
    assert float(rows['lowq_time_to_first_token_seconds_count{model="talk"}']) >= 1
