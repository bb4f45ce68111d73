"""Packages that people use against a server, where they are installed: lm-eval, LangChain, litellm, llm, instructor."""

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
from talking import Heard, running

CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
TOWN = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}


def test_lm_evals_local_completions_has_the_scores_of_eval(server, talk, tmp_path, monkeypatch):
    """Likelihoods and greedy texts by HTTP are those of `lowq eval --tasks`."""
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval[api] is not installed")
    from lowq_cli.engine.open_model import ready
    from lowq_cli.evaluate.tasks import Judge
    from lowq_cli.serving.offline import answers

    model, tokenizer = ready(talk, "cpu")
    judge = Judge(model, tokenizer, answers, unseen)
    how = {"base_url": f"{server.url}/v1/completions", "tokenizer": str(talk), "max_length": 1024, "batch_size": 2}
    client = completions.LocalCompletionsAPI(model="talk", **how)
    pairs = [("Once upon a time there was a little", ende) for ende in (" girl", " xylophone quantum", " dog. He")]
    pairs += [("", "The sun"), ("She saw a", " cat")]
    requests = [SimpleNamespace(args=p) for p in pairs]
    mine, theirs = judge.loglikelihood(requests), client.loglikelihood(requests, disable_tqdm=True)
    for (a, greedy), (b, also), pair in zip(mine, theirs, pairs, strict=True):
        assert math.isclose(a, b, abs_tol=1e-3), pair
        assert greedy == also, pair
    written = [SimpleNamespace(args=("Once upon a time", {"until": ["."], "max_gen_toks": 12, "do_sample": False}))]
    assert client.generate_until(written, disable_tqdm=True)[0].strip() == judge.generate_until(written)[0].strip()


class unseen:  # progress that is not shown
    def __init__(self, *_):
        pass

    def __enter__(self):
        return lambda done, note: None

    def __exit__(self, *_):
        pass


def test_langchain():
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    engine = Heard(CALL)
    with running(engine) as url:
        model = langchain.ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none")
        tool = {"type": "function", "function": {"name": "weather", "parameters": TOWN}}
        result = model.bind_tools([tool]).invoke("Rain?")
        assert [(c["name"], c["args"]) for c in result.tool_calls] == [("weather", {"town": "Ulm"})]
        whole = None
        for chunk in model.bind_tools([tool]).stream("Rain?"):
            whole = chunk if whole is None else whole + chunk
        assert whole.tool_calls[0]["args"] == {"town": "Ulm"}
    with running(Heard("Yes.")) as url:
        model = langchain.ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="none", use_responses_api=True)
        assert model.invoke("Rain?").text == "Yes."


def test_litellm():
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    with running(Heard("<think>hm</think>Yes.")) as url:
        how = {"messages": [{"role": "user", "content": "Hi"}], "api_key": "none"}
        for name, base in (("openai/m", f"{url}/v1"), ("anthropic/m", url), ("ollama_chat/m", url)):
            result = litellm.completion(model=name, api_base=base, max_tokens=100, **how).choices[0].message
            assert result.content == "Yes."
        assert litellm.responses(model="openai/m", input="Hi", api_base=f"{url}/v1", api_key="none").output_text == "Yes."


def test_instructor():
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")

    class Town(pydantic.BaseModel):
        town: str

    output = json.dumps({"name": "Town", "arguments": {"town": "Ulm"}})
    with running(Heard(f"<tool_call>\n{output}\n</tool_call>")) as url:
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"))
        response = client.chat.completions.create(
            model="m", response_model=Town, messages=[{"role": "user", "content": "Where?"}]
        )
        assert response.town == "Ulm"


def test_llm(tmp_path, monkeypatch):
    llm = pytest.importorskip("llm", reason="llm is not installed")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    with running(Heard("Yes.")) as url:
        (tmp_path / "extra-openai-models.yaml").write_text(f"- model_id: m\n  model_name: m\n  api_base: {url}/v1\n")
        model = llm.get_model("m")
        model.key = "none"
        assert model.prompt("Hi", stream=False).text() == model.prompt("Hi").text() == "Yes."


def test_many_clients_of_every_dialect_at_once(server):
    """Nothing of one answer comes into another's, whatever dialect each is in."""
    import httpx

    hi = [{"role": "user", "content": "Hi"}]
    bodies = {
        "v1/chat/completions": {"messages": hi, "max_tokens": 6, "temperature": 0},
        "v1/messages": {"model": "talk", "messages": hi, "max_tokens": 6, "temperature": 0},
        "v1/responses": {"input": "Hi", "max_output_tokens": 6, "temperature": 0},
        "api/chat": {"model": "talk", "messages": hi, "options": {"num_predict": 6, "temperature": 0}, "stream": False},
    }
    text = {
        "v1/chat/completions": lambda a: a["choices"][0]["message"]["content"],
        "v1/messages": lambda a: a["content"][0]["text"],
        "v1/responses": lambda a: a["output"][0]["content"][0]["text"],
        "api/chat": lambda a: a["message"]["content"],
    }

    async def all_of_them():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            paths = list(bodies) * 4
            result = await asyncio.gather(*(client.post(f"/{p}", json=bodies[p]) for p in paths))
            return [text[p](a.json()) for p, a in zip(paths, result, strict=True)]

    assert len(set(asyncio.run(all_of_them()))) == 1
