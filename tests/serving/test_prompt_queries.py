"""What is asked of prompts themselves: likelihoods (echo), vectors, documents by how well they answer."""

import base64
import json
import math

import numpy as np
import pytest
import torch
from asking import build
from saying import byte_tokenizer, opened, served_by

from lowq_cli.engine.open_model import ready
from lowq_cli.evaluate.perplexity import logits_of
from lowq_cli.serving.dialects.rerank import score
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.http.loading import pooling_of
from lowq_cli.serving.sequential import SequentialEngine

TEXT = "Once upon a time"


@pytest.fixture(scope="module", params=["continuous", "sequential"])
def tiny(request):
    """A random model in each engine, its tokenizer, and the model itself."""
    model = build("llama")
    engine = engine_of(model, 64) if request.param == "continuous" else SequentialEngine(model, 64)
    yield engine, byte_tokenizer(template="{% for m in messages %}{{ m.content }};{% endfor %}"), model
    engine.stop(0)


@pytest.fixture(scope="module")
def ask(tiny):
    """Answers of one server."""
    engine, tokenizer, _ = tiny
    with opened(served_by(engine, tokenizer)) as one:
        yield one


def logs_of(model, ids):
    with torch.inference_mode():
        return logits_of(model, torch.tensor([ids])).float().log_softmax(-1)[0]


def test_an_engine_is_started_once(tiny, ask):
    """A second thread would compute the same requests."""
    assert ask("completions", {"prompt": TEXT, "max_tokens": 1})[0] == 200
    with pytest.raises(RuntimeError, match="started once"):
        tiny[0].start(lambda batch: None)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("given", ["text", "ids"])
def test_a_prompt_is_echoed_with_how_likely_its_tokens_are(tiny, ask, streamed, most, given):
    _, tokenizer, model = tiny
    ids = tokenizer(TEXT)["input_ids"]
    body = {"prompt": TEXT if given == "text" else ids, "echo": True, "logprobs": 2, "max_tokens": most, "temperature": 0}
    status, answer = ask("completions", body | {"stream": streamed})
    assert status == 200, answer
    parts = [c for a in (answer if streamed else [answer]) for c in a["choices"]]
    rows = {
        k: [v for c in parts if c["logprobs"] for v in c["logprobs"][k]]
        for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert "".join(c["text"] for c in parts)[: len(TEXT)] == TEXT
    assert len(rows["tokens"]) == len(ids) + most
    assert rows["tokens"][: len(ids)] == list(TEXT)
    assert rows["text_offset"][: len(ids)] == list(range(len(TEXT)))
    logs = logs_of(model, ids)
    assert rows["token_logprobs"][0] is rows["top_logprobs"][0] is None
    expected = [float(logs[i, token]) for i, token in enumerate(ids[1:])]
    assert rows["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    best = [float(logs[i].max()) for i in range(len(ids) - 1)]
    assert [max(t.values()) for t in rows["top_logprobs"][1 : len(ids)]] == pytest.approx(best, abs=1e-4)


def test_texts_are_vectors(tiny, ask):
    """The hidden states that logits are made of, pooled, and of length one."""
    _, tokenizer, model = tiny
    texts = [TEXT, "b", TEXT]
    with torch.inference_mode():
        ids = [torch.tensor([tokenizer(t)["input_ids"]]) for t in texts]
        hidden = [model(input_ids=i, output_hidden_states=True).hidden_states[-1][0] for i in ids]
    for pooling, pooled in (("last", lambda h: h[-1]), ("mean", lambda h: h.mean(0)), ("first", lambda h: h[0])):
        status, answer = ask("embeddings", {"input": texts, "pooling": pooling})
        assert status == 200, answer
        for h, result in zip(hidden, answer["data"], strict=True):
            expected = pooled(h) / pooled(h).norm()
            assert result["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert [d["index"] for d in answer["data"]] == [0, 1, 2]
    assert answer["data"][0]["embedding"] == answer["data"][2]["embedding"]
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer(t)["input_ids"]) for t in texts)


def test_vectors_cut_encoded_and_as_they_are(ask):
    plain = ask("embeddings", {"input": TEXT, "normalize": False})[1]["data"][0]["embedding"]
    cut = ask("embeddings", {"input": TEXT, "dimensions": 8})[1]["data"][0]["embedding"]
    expected = np.array(plain[:8]) / np.linalg.norm(plain[:8])
    assert cut == pytest.approx(expected.tolist(), abs=1e-5)
    raw = ask("embeddings", {"input": TEXT, "encoding_format": "base64", "normalize": False})[1]["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(raw), np.float32).tolist() == plain


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": "x", "dimensions": 65}, "more than the model's 64"),
        ("embeddings", {"input": "x", "pooling": "sum"}, "pooling"),
        ("embeddings", {"input": "x" * 600}, "prompt is too long: 600 tokens"),
        ("embeddings", {"input": [[999]]}, "token id 999"),
        ("embeddings", {"input": ["x"] * 2049}, "2049 texts"),
        ("rerank", {"query": "x", "documents": []}, "documents"),
        ("rerank", {"documents": ["x"]}, "query"),
    ],
    ids=str,
)
def test_unsupported_queries_are_refused(ask, path, body, line):
    status, answer = ask(path, body)
    assert status == 400
    assert line in answer["error"]["message"]


def test_a_score_is_the_share_of_yes():
    spelled = {1: " Yes", 2: "no", 3: "maybe", 4: "yes"}
    likely = (0.0, tuple((t, math.log(p)) for t, p in ((1, 0.3), (3, 0.3), (2, 0.2), (4, 0.1))))
    assert score(likely, spelled.get) == pytest.approx(0.4 / 0.6)
    assert score((0.0, ((3, -1.0),)), spelled.get) == 0.0


def test_documents_come_best_first(ask):
    documents = ["a", {"text": "bb"}, "ccc"]
    status, answer = ask("rerank", {"query": "q", "documents": documents, "top_n": 2, "return_documents": True})
    assert status == 200, answer
    assert [len(answer["results"]), list(answer["results"][0])] == [2, ["index", "relevance_score", "document"]]
    scores = [r["relevance_score"] for r in answer["results"]]
    assert scores == sorted(scores, reverse=True)


def test_how_a_folder_says_that_vectors_are_made(tmp_path):
    assert pooling_of(str(tmp_path)) == "last"
    (tmp_path / "1_Pooling").mkdir()
    for mode, way in (("lasttoken", "last"), ("cls_token", "first"), ("mean_tokens", "mean")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
        assert pooling_of(str(tmp_path)) == way


def test_openais_client_and_texts_beside_vectors(server):
    openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    response = client.embeddings.create(model="talk", input=["one", "two"], dimensions=16)
    assert [len(d.embedding) for d in response.data] == [16, 16]
    _, tokenizer = ready("demo", "cpu")
    echoed = client.completions.create(model="talk", prompt=TEXT, echo=True, logprobs=0, max_tokens=1)
    assert len(echoed.choices[0].logprobs.tokens) == len(tokenizer(TEXT)["input_ids"]) + 1
