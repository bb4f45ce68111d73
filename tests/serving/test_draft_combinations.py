"""Drafts together with adapters, pictures and blocks in host memory, requested with OpenAI's own client."""

import asyncio
import base64
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from asking import adapter, check_all
from saying import byte_tokenizer
from test_device_drafts import always, made, prompts
from transformers import AutoModelForCausalLM

from lowq_cli.engine.drafts.model import ModelDrafter
from lowq_cli.engine.lora import adapt
from lowq_cli.engine.open_model import ready
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import read_adapter
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.host_memory import HostMemory
from lowq_cli.serving.http.app import Served, make_app
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.pictures import PictureReader
from lowq_cli.serving.http.served_model import Facts, ServedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
import sighted

openai = pytest.importorskip("openai", reason="OpenAI's own package is not installed")
DRAFTERS = ("EAGLE-3", "MTP of glm4_moe", "ngram")


def message(*images, text="What is this?"):
    parts = [{"type": "image_url", "image_url": {"url": i}} for i in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def url(image):
    return "data:image/png;base64," + base64.b64encode(sighted.encoded(image, "PNG")).decode()


class Believed:
    """An engine whose drafts are checked whatever they bring; `always` takes something that has one. ahead: as on a GPU."""

    def __init__(self, engine, ahead):
        self.engine = engine
        if ahead:
            engine.pipeline.ahead = 1
        if ahead and engine.drafts is not None:
            engine.drafts.go_ahead()
        assert isinstance(engine, ContinuousEngine)
        if engine.drafts is not None and engine.drafts.guesses is not None:
            always(self)
        elif engine.drafts is not None:
            check_all(engine.drafts)


def asked(model, tokenizer, requests, draft, facts=None, pictures=None, ends=frozenset(), ahead=False, **how):
    """(texts, usages, the engine's counts) of requests (kind of request, its fields): with drafts first all at once, and then
    one by one; without drafts one by one."""
    engine = Believed(engine_of(model, 64, draft=draft, **how), ahead).engine
    pool = ModelPool.of_one(ServedModel(engine, tokenizer, "base", ends, facts=facts, pictures=pictures))
    place = pool.places["base"]
    if facts is not None:
        place.offer = replace(place.offer, how={"lora": dict.fromkeys(facts.adapters, "")})
    served = Served(pool)
    with asyncio.Runner() as runner:
        runner.run(served.models.start(lambda n, of: None))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=make_app(served)), timeout=120)
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)

        def call(kind, fields):
            create = client.chat.completions.create if kind == "chat" else client.completions.create
            return create(**{"model": "base", "temperature": 0} | fields)

        async def all_at_once():
            return await asyncio.gather(*(call(*one) for one in requests))

        answers = runner.run(all_at_once()) if draft != "none" else []
        answers += [runner.run(all_of(call(*one))) for one in requests]
        counts = engine.stats()
        engine.stop(0)
        runner.run(http.aclose())
    texts = [c.message.content if hasattr(c, "message") else c.text for a in answers for c in a.choices]
    return texts, [a.usage for a in answers], counts


async def all_of(one):
    return await one


def details(usages):
    """(accepted, rejected) tokens of all answers."""
    each = [u.completion_tokens_details for u in usages]
    return tuple(sum(getattr(d, f"{n}_prediction_tokens") or 0 for d in each) for n in ("accepted", "rejected"))


@pytest.mark.parametrize("kind", [pytest.param(DRAFTERS[0], marks=pytest.mark.more), *DRAFTERS[1:]])
def test_adapters_and_blocks_in_host_memory(kind, tmp_path):
    model, drafter = made("another model" if kind == "ngram" else kind, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    folders = [adapter(tmp_path / name, whole, seed) for seed, name in enumerate("ab")]
    adapt(plan_of(model), [read_adapter(f, f.name) for f in folders])
    begin, names = prompts(140)[0], ("base", "a", "b")
    texts = [begin + p if i % 2 else p * 3 for i, p in enumerate(prompts(20, 30, 40, 25))]
    requests = [("text", {"prompt": p, "max_tokens": 8, "model": n}) for p in texts for n in names]
    facts, tokenizer = Facts(adapters=names[1:]), byte_tokenizer()
    expected, _, _ = asked(model, tokenizer, requests, "none", facts, running=12)
    assert len(set(expected)) > 8
    memory = HostMemory(8 << 20, 1)
    draft = "ngram" if kind == "ngram" else drafter
    result, usages, counts = asked(model, tokenizer, requests, draft, facts, running=3, cache_tokens=768, host=memory.lend("m"))
    memory.close()
    assert result == expected * 2
    assert counts.host_hits
    assert details(usages) == (counts.accepted, counts.drafted - counts.accepted)
    assert counts.drafted > 0


PICTURE = url(sighted.drawing(1))


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """A model, its tokenizer, what reads pictures for it (one process, which has read PICTURE), requests and their answers."""
    folder = sighted.write("qwen3_vl", tmp_path_factory.mktemp("sees"))
    model, tokenizer = ready(str(folder), "cpu")
    reader = PictureReader(str(folder), plan_of(model).model.images)
    asyncio.run(reader.read([("picture", PICTURE)]))
    texts = [message(PICTURE), message(text="one two one two one two one two"), message(PICTURE, text="x y x y x y x y")]
    requests = [("chat", {"messages": [m], "max_tokens": 24}) for m in texts]
    expected, _, _ = asked(model, tokenizer, requests, "none", pictures=reader)
    return model, tokenizer, reader, requests, expected


@pytest.mark.parametrize("kind", ["ngram", "itself"])
def test_pictures(kind, sees):
    """Texts with and without pictures in one batch; rows after a picture rotate by positions of three parts."""
    model, tokenizer, reader, requests, expected = sees
    plan = plan_of(model)
    draft = kind if kind == "ngram" else ModelDrafter(plan, "itself", plan.vocabulary)
    memory = HostMemory(8 << 20, 1)
    result, usages, counts = asked(
        model, tokenizer, requests, draft, pictures=reader, running=2, cache_tokens=512, host=memory.lend("m")
    )
    memory.close()
    assert result == expected * 2
    assert details(usages) == (counts.accepted, counts.drafted - counts.accepted)
    assert counts.drafted > 0
