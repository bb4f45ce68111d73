"""ollama's own package against /api, and /tokenize."""

import json

import httpx
import pytest
from talking import Heard, running

from lowq_cli.serving.dialects.ollama import Ollama

ollama = pytest.importorskip("ollama", reason="ollama's own package is not installed")
CALL = '<think>\nhm\n</think>\n\nI look.<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
TOWN = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": TOWN}}
HI = [{"role": "user", "content": "Hi"}]


ZEROS, LIVES = (0, "0", "0s", "0.0m"), (5, "10m", "0x", None)


def ask(engine, asked, **how):
    with running(engine, **how) as url:
        return asked(ollama.Client(url))


def chat(engine, **more):
    return ask(engine, lambda client: client.chat(**{"model": "m", "messages": HI} | more))


def facts(message):
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    return message.thinking, message.content, calls


def test_a_chat_whole_and_as_it_comes():
    expected = ("hm", "I look.", [("weather", {"town": "Ulm"})])
    result = chat(Heard(CALL), tools=[TOOL])
    assert facts(result.message) == expected
    assert (result.done, result.done_reason, result.eval_count) == (True, "stop", len(Heard(CALL).tokens))

    def streamed(client):
        return list(client.chat(model="m:latest", messages=HI, tools=[TOOL], stream=True))

    parts = ask(Heard(CALL), streamed)
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    output = [facts(p.message) for p in parts]
    assert "".join(t or "" for t, _, _ in output) == "hm"
    assert "".join(c or "" for _, c, _ in output) == "I look."
    assert [c for _, _, calls in output for c in calls] == expected[2]
    assert parts[-1].prompt_eval_count == result.prompt_eval_count


def test_a_conversation_with_tools_reaches_the_template():
    engine = Heard("Rain.")
    output = [
        {"role": "system", "content": "Be kind."},
        *HI,
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "Ulm"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "wet"},
    ]
    chat(engine, messages=output, tools=[TOOL])
    assert engine.prompts[0].splitlines()[1:] == [
        "system[]: Be kind.",
        "user[]: Hi",
        'assistant[hm]: <call_weather|weather|{"town": "Ulm"}>',
        "tool[]: wet(call_weather)",
        "assistant:",
    ]


def test_options_and_thinking():
    engine = Heard("Yes.")
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "num_predict": 3,
        "seed": 4,
        "num_ctx": 4096,
        "repeat_penalty": 1.5,
        "stop": ["!"],
    }
    result = chat(engine, options=options, think=False, keep_alive="5m")
    request = engine.requests[0]
    assert (request.draw.temperature, request.draw.top_k, request.draw.seed) == (0.5, 7, 4)
    assert (request.draw.repetition_penalty, request.max_tokens) == (1.5, 3)
    assert (result.done_reason, result.message.content) == ("length", "Yes")
    assert engine.prompts[0].endswith("</think>\n\n")


def test_generate():
    engine = Heard("Yes.")

    def asked(client):
        client.generate(model="m", prompt="Hi", system="Be kind.")
        raw = client.generate(model="m", prompt="Once", raw=True)
        return raw, list(client.generate(model="m", prompt="Once", raw=True, stream=True))

    raw, parts = ask(engine, asked)
    assert engine.prompts[0] == "system[]: Be kind.\nuser[]: Hi\nassistant:"
    assert (engine.prompts[1], raw.response) == ("Once", "Yes.")
    assert "".join(p.response for p in parts) == "Yes."


def test_generate_goes_on_with_the_prompt_of_a_model_without_a_template():
    engine = Heard("Yes.", template=None)

    def asked(client):
        with pytest.raises(ollama.ResponseError, match="no chat template"):
            client.chat(model="m", messages=HI)
        whole = client.generate(model="m", prompt="Once", system="Be kind.")
        return whole, list(client.generate(model="m", prompt="Once", stream=True))

    whole, parts = ask(engine, asked)
    assert whole.response == "".join(p.response for p in parts) == "Yes."
    assert set(engine.prompts) == {"Once"}


def test_a_request_without_a_prompt_only_loads_the_model():
    engine = Heard("Yes.")

    def asked(client):
        empty = [client.generate(model="m"), client.generate(model="m", prompt="", raw=True), client.chat(model="m")]
        return [*empty, *client.chat(model="m", messages=[], stream=True), *client.generate(model="m", stream=True)]

    assert {(one.done, one.done_reason) for one in ask(engine, asked)} == {(True, "load")}
    assert not engine.requests


def test_keep_alive_of_0_without_a_prompt_unloads_but_not_the_only_model():
    """What `ollama stop` sends."""
    alive = {one: Ollama(chat=False).read({"model": "m", "keep_alive": one}).dialect["unloads"] for one in ZEROS + LIVES}
    assert {one for one, unloads in alive.items() if unloads} == set(ZEROS)
    assert not Ollama(chat=False).read({"model": "m", "prompt": "a", "keep_alive": 0, "raw": True}).dialect.get("unloads")
    answer = ask(Heard("Yes."), lambda client: client.generate(model="m", keep_alive=0))
    assert (answer.done, answer.done_reason) == (True, "load")


def test_the_older_path_of_one_vector(server):
    client = ollama.Client(server.url)
    one, several = client.embeddings(model="talk:latest", prompt="Once upon a time"), client.embed("talk", ["Once upon a time"])
    length = sum(x * x for x in one.embedding) ** 0.5
    assert [x / length for x in one.embedding] == pytest.approx(list(several.embeddings[0]), abs=1e-5)
    assert abs(length - 1) > 0.01  # as in ollama, it is not made of length one
    with pytest.raises(ollama.ResponseError, match="input"):
        client.embeddings(model="talk", prompt=None)


@pytest.mark.parametrize("form", ["json", TOWN], ids=["json", "schema"])
def test_a_form_is_a_mask(form):
    pytest.importorskip("llguidance", reason="forms need the extra lowq[grammar]")
    engine = Heard("x")
    chat(engine, format=form)
    assert engine.requests[0].mask is not None


def test_models_are_listed():
    def asked(client):
        return client.list(), client.ps(), client.show("m:latest")

    result, loaded, shown = ask(Heard("x"), asked)
    assert [m.model for m in result.models] == [m.model for m in loaded.models] == ["m"]
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}


@pytest.mark.parametrize(
    ("more", "status"),
    [({"model": "other"}, 404), ({"options": {"mirostat": 2}}, 400), ({"messages": [{"role": "x"}]}, 400)],
    ids=str,
)
def test_refusals_have_ollamas_shape(more, status):
    with pytest.raises(ollama.ResponseError) as refused:
        chat(Heard("x"), **more)
    assert refused.value.status_code == status
    assert refused.value.error


def test_texts_and_conversations_as_tokens_and_back():
    engine = Heard("Yes.", special=("<x>",))
    with running(engine) as url:

        def post(path, body):
            result = httpx.post(f"{url}/{path}", json=body)
            return result.status_code, result.json()

        _, result = post("tokenize", {"prompt": "a<x>é"})
        assert (result["count"], result["tokens"]) == (4, engine.tokenizer("a<x>é")["input_ids"])
        assert post("detokenize", {"tokens": result["tokens"]})[1] == {"prompt": "a<x>é", "content": "a<x>é"}
        _, pieces = post("tokenize", {"content": "ab", "with_pieces": True})
        assert [t["piece"] for t in pieces["tokens"]] == ["a", "b"]
        _, conversation = post("tokenize", {"messages": HI})
        post("v1/chat/completions", {"messages": HI})
        assert conversation["tokens"] == list(engine.requests[0].prompt)
        for path, wrong in (
            ("tokenize", {}),
            ("tokenize", {"prompt": 3}),
            ("detokenize", {"tokens": [1 << 40]}),
            ("detokenize", {}),
        ):
            status, answer = post(path, wrong)
            assert (status, json.dumps(answer)[:8]) == (400, '{"error"')


def test_every_path_that_shows_something_asks_for_the_key():
    with running(Heard("x"), api_key="secret") as url:
        for path in ("api/tags", "api/ps", "api/version", "tokenize", "metrics", "v1/models", "api/chat", "nothing"):
            assert httpx.get(f"{url}/{path}").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
