"""Adapters in the server: many at once over one base, each text that of its adapter alone; by name, field and file."""

import os
import random
import shutil
import signal
import time

import pytest
import torch
from asking import Client, Replayed, adapter, build, check_all, prompts
from safetensors.torch import load_file, save_file
from saying import byte_tokenizer, posts

from lowq_cli.engine import lora_folding, lora_product
from lowq_cli.engine.lora import adapt
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import CONFIG, WEIGHTS, read_adapter
from lowq_cli.serving.catalog import read_config
from lowq_cli.serving.engines import engine_of
from lowq_cli.serving.http.app import Served
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.served_model import Facts, Refused, ServedModel
from lowq_cli.serving.request import Request
from lowq_packers.errors import UsageError

MANY = 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, model = tmp_path_factory.mktemp("adapters"), build("llama")
    return [adapter(root / f"a{i}", model, i, rank=1 + i % 9) for i in range(MANY)]


@pytest.fixture(scope="module")
def asked():
    """A prompt for each, some of which begin alike."""
    begin = prompts(140)[0]
    return [begin + p if i % 2 else p for i, p in enumerate(prompts(*(range(5, 5 + MANY)), seed=9))]


@pytest.fixture(scope="module")
def wanted(folders, asked):
    """The text of each merged model, alone, of its prompt."""
    result = []
    for folder, prompt in zip(folders, asked, strict=True):
        model = build("llama")
        for name, (A, B) in read_adapter(folder).factors.items():
            model.get_submodule(name).weight.data += B @ A
        client = Client(model, running=1)
        result.append(client.tokens(client.ask(prompt, 8))[0])
        client.engine.stop(0)
    return result


def adapted(folders):
    model = build("llama")
    adapt(plan_of(model), [read_adapter(f, f.name) for f in folders])
    return model


@pytest.mark.parametrize(
    "how",
    [
        {"running": 32},
        {"running": 5, "cache_tokens": 1280},
        {"running": 4, "deterministic": True},
        {"running": 8, "draft": "ngram"},
    ],
    ids=str,
)
def test_many_adapters_at_once_are_those_alone(folders, asked, wanted, how):
    """Together with the base; prompts that begin alike share blocks only within one adapter."""
    client = Client(adapted(folders), **how)
    base = Client(build("llama"), running=1)
    order = list(range(MANY)) * 2
    random.Random(1).shuffle(order)
    numbers = [client.engine.submit(Request(tuple(asked[i]), 8, adapter=i + 1)) for i in order]
    plain = [client.engine.submit(Request(tuple(p), 8)) for p in asked[:4]]
    assert client.tokens(*numbers) == [wanted[i] for i in order]
    assert client.tokens(*plain) == base.tokens(*(base.ask(p, 8) for p in asked[:4]))
    again = client.engine.submit(Request(tuple(asked[1]), 8, adapter=2))
    assert client.tokens(again) == [wanted[1]]
    with pytest.raises(UsageError, match="adapter=33"):
        client.engine.submit(Request((1, 2), 8, adapter=33))
    client.engine.stop(0)
    base.engine.stop(0)


def test_adapters_differ(wanted, asked):
    client = Client(build("llama"), running=1)
    plain = [client.tokens(client.ask(p, 8))[0] for p in asked[:8]]
    assert all(a != b for a, b in zip(plain, wanted[:8], strict=True))
    client.engine.stop(0)


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_pass_without_adapters_is_that_of_a_server_without(folders, asked, wanted, monkeypatch, draft):
    client, added = Client(adapted(folders[:3]), running=4, draft=draft), []
    passes, add = client.engine.passes, lora_product.add_low_rank
    monkeypatch.setattr(lora_product, "add_low_rank", lambda *what: added.append(what[3].clone()) or add(*what))
    passes.sizes.padded, passes.met, passes.pool = True, set(), object()
    passes.capture = lambda step, pool: Replayed(step, passes.rows)
    if draft == "ngram":
        client.engine.drafts.passes.sizes = [4, 8, 16, 32, 64]
        check_all(client.engine.drafts)
    plain = Client(build("llama"), running=1)
    expected = plain.tokens(*(plain.ask(p, 8) for p in asked[:3]))
    for i in range(3):  # sizes are recorded when they come again
        for rounds in range(2):
            assert client.tokens(*(client.ask(p, 8) for p in asked[:3])) == expected
            assert not added, rounds
        numbers = [client.engine.submit(Request(tuple(asked[j]), 8, adapter=j + 1)) for j in range(i, 3)]
        assert client.tokens(client.ask(asked[0], 8), *numbers) == [expected[0], *wanted[i:3]]
        assert added
        added.clear()
    if draft == "none":
        assert {key[2] for key, (graph, _) in passes.captured.items() if graph.count} == {False, True}
        both = [key for key in passes.captured if key[2] and (*key[:2], False) in passes.captured]
        assert both
        assert all(passes.captured[key][0].logits is passes.captured[*key[:2], False][0].logits for key in both)
    assert {key[2] for key in passes.token_budget.known} == {False, True}
    for kind in (False, True):  # what the start measures
        with torch.inference_mode():
            passes.measure(2, 2, kind)
        assert bool(added) == kind
        assert all(int(rows.min()) == 1 for rows in added)
    assert not passes.rows.adapter.any()
    for one in (client, plain):
        one.engine.stop(0)


def test_steps_that_add_in_gates_have_the_texts_of_merged_models(folders, asked, wanted):
    """As on a GPU, in Triton's interpreter."""
    pytest.importorskip("triton", reason="needs triton")
    model = adapted(folders[:3])
    plan = plan_of(model)
    plan.adds_in_gates = True
    client = Client(model, running=2)
    numbers = [client.engine.submit(Request(tuple(asked[i]), 4, adapter=i + 1)) for i in (0, 2)]
    assert client.tokens(*numbers) == [wanted[i][:4] for i in (0, 2)]
    assert any(isinstance(step, lora_folding.AddedGate) for step in plan.program(2, adapted=True))
    client.engine.stop(0)


def test_an_adapter_is_asked_for_as_a_model_or_by_a_field(folders, wanted, asked):
    names, tokenizer = tuple(f.name for f in folders), byte_tokenizer()
    model = ServedModel(engine_of(adapted(folders), 64), tokenizer, "base", frozenset(), facts=Facts(adapters=names))
    pool = ModelPool.of_one(model)
    place = pool.places["base"]
    place.offer = place.offer.__class__(
        "base", place.offer.path, {"lora": {n: str(f) for n, f in zip(names, folders, strict=True)}}
    )
    body = {"prompt": asked[2], "max_tokens": 8, "temperature": 0, "skip_special_tokens": False}
    result = posts(
        Served(pool),
        *(
            ("completions", body | more)
            for more in ({"model": "a2"}, {"model": "base", "lora": "a2"}, {"model": "base"}, {"lora": "x"}, {"model": "x"})
        ),
        ("embeddings", {"input": "x", "model": "a2"}),
        ("embeddings", {"input": "x", "model": "base"}),
    )
    text = tokenizer.decode(wanted[2])
    assert [a["choices"][0]["text"] == text for _, a in result[:3]] == [True, True, False]
    assert [a["model"] for _, a in result[:3]] == ["a2", "a2", "base"]
    assert [status for status, _ in result] == [200, 200, 200, 404, 404, 200, 200]
    assert result[5][1]["data"] != result[6][1]["data"]
    listed = {m["id"]: m.get("parent") for m in pool.entries()}
    assert listed == {"base": None, **dict.fromkeys(names, "base")}
    model.engine.stop(0)


def test_a_file_names_adapters(tmp_path):
    (tmp_path / "c.toml").write_text('[models.m]\npath = "demo"\nlora = {a = "x"}\n')
    assert read_config(tmp_path / "c.toml").models["m"].lora == {"a": str(tmp_path / "x")}


def test_the_command_serves_adapters(start_on, tmp_path):
    import httpx

    import lowq

    folder = adapter(tmp_path / "own", lowq.load("demo", device="cpu")[0], 3, 4)
    server = start_on("demo", "--lora", f"own={folder}")
    texts = []
    for name in ("own", "demo"):
        body = {"model": name, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["model"] == name
        texts.append(answer["choices"][0]["text"])
    assert texts[0] != texts[1]


BROKEN = {  # what is done to a whole adapter's folder -> what the refusal says
    "folder emptied": (lambda d: [file.unlink() for file in d.iterdir()], "holds no adapter_config.json"),
    "weights deleted": (lambda d: (d / WEIGHTS).unlink(), "holds no adapter_model.safetensors"),
    "weights cut off": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-40]), "truncated"),
    "weights empty": (lambda d: (d / WEIGHTS).write_bytes(b""), "too short for a safetensors file"),
    "weights a folder": (lambda d: (d / WEIGHTS).unlink() or (d / WEIGHTS).mkdir(), "holds no adapter_model.safetensors"),
    "another shape": (
        lambda d: rewritten(d, lambda n, t: (n, t[:, 1:].contiguous() if "lora_A" in n else t)),
        "is of another model",
    ),
    "another base": (
        lambda d: rewritten(d, lambda n, t: (n.replace("layers.", "layers.9"), t)),
        "not a separate matrix product",
    ),
    "another rank": (lambda d: (d / CONFIG).write_text('{"peft_type": "LORA", "r": 5}'), "factors of rank 4"),
    "no JSON": (lambda d: (d / CONFIG).write_text("{"), CONFIG),
    "another kind": (lambda d: (d / CONFIG).write_text('{"peft_type": "LOHA"}'), "the kind LOHA"),
}


def rewritten(folder, change):
    save_file(dict(change(n, t) for n, t in load_file(folder / WEIGHTS).items()), folder / WEIGHTS)


def copied(whole, folder):
    """The whole adapter in a folder, with files as old as those."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)


def test_a_broken_adapter_is_refused_alone_until_it_is_mended(start_on, talk, tmp_path):
    """In a server of one model; the next request takes what was mended, and so does SIGHUP."""
    import httpx

    import lowq

    whole = adapter(tmp_path / "whole", lowq.load(talk, device="cpu")[0], 3, 4)
    for file in (whole / WEIGHTS, whole / CONFIG):
        os.utime(file, (1e9, 1e9))
    folders = {name.replace(" ", "-"): tmp_path / name for name in BROKEN}
    for folder, (damage, _) in zip(folders.values(), BROKEN.values(), strict=True):
        copied(whole, folder)
        damage(folder)
    flags = (f"--lora={n}={d}" for n, d in {"whole": whole, **folders}.items())
    server = start_on(talk, *flags, "--max-batch", 2, "--cache-tokens", 512)

    def asked(model, **more):
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, **more}
        return server.post("completions", body)

    def listed():
        return {m["id"]: m for m in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]}

    text, plain = (asked(name).json()["choices"][0]["text"] for name in ("whole", "talk"))
    assert text != plain
    for (name, folder), (_, fault) in zip(folders.items(), BROKEN.values(), strict=True):
        for answer in (asked(name), asked("talk", lora=name)):
            error = answer.json()["error"]["message"]
            assert (answer.status_code, "\n" in error) == (503, False)
            assert fault in error
            assert str(folder) in error
        assert (listed()[name]["loaded"], listed()[name]["error"] in error) == (False, True)
        assert sum(f"without the adapter {name}: " in line for line in server.said) == 1
    assert listed()["whole"]["loaded"]

    first, *others = folders
    copied(whole, folders[first])
    assert asked(first).json()["choices"][0]["text"] == text
    assert asked("talk").json()["choices"][0]["text"] == plain
    for name in others:
        copied(whole, folders[name])
    server.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + 60
    while any("error" in one for one in listed().values()):
        assert time.monotonic() < until, server.said
        time.sleep(0.02)
    assert [asked(name).json()["choices"][0]["text"] for name in others] == [text] * len(others)
    assert sum("without the adapter" in line for line in server.said) == len(folders) + len(others)
    assert server.stop() == 0


def test_files_that_are_being_written_are_not_read_by_a_request(tmp_path):
    refused = Refused.of(str(tmp_path))
    assert not refused.changed(settled=False)
    (tmp_path / WEIGHTS).write_bytes(b"half")
    assert [refused.changed(settled) for settled in (True, False)] == [False, True]
    os.utime(tmp_path / WEIGHTS, (1e9, 1e9))
    assert refused.changed(settled=True)
