"""Blocks that a cache has no room for: in host memory, and back without a bit changed; also over a model's unloading."""

import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from asking import Client, adapter, build, prompts
from engine_processes import engines_of
from swaps import make_models
from test_device_drafts import always

from lowq_cli.engine.drafts.model import ModelDrafter
from lowq_cli.engine.lora import adapt
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import read_adapter
from lowq_cli.serving.host_blocks import HostBlocks
from lowq_cli.serving.host_memory import HostMemory, Kept
from lowq_cli.serving.http.loading import keyed
from lowq_cli.serving.http.place import PROCESS
from lowq_cli.serving.request import Request

KINDS = {
    "llama": {},
    "gemma3_text": {"sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_bias": True},
}


@pytest.fixture(scope="module")
def models():
    return {kind: build(kind, **settings) for kind, settings in KINDS.items()}


@pytest.fixture
def model(models, request):
    return models[getattr(request, "param", "llama")]


@pytest.fixture
def lend():
    results = []

    def one(bytes_=16 << 20):
        results.append(HostMemory(bytes_, 1))
        return results[-1]

    yield one
    for memory in results:
        memory.close()


def held(client):
    """Every name in host memory with the bytes of its block."""
    cache, result = client.engine.host_cache, {}
    for g, host in enumerate(client.engine.scheduler.cache.host_blocks):
        for name, place in host.record():
            result[g, name] = torch.cat([there[place - 1].flatten() for _, there in cache.groups[g]])
    return result


@pytest.mark.parametrize(
    ("model", "kv"),
    [*((kind, "16") for kind in KINDS), pytest.param("llama", "fp8", marks=pytest.mark.more), ("llama", "4")],
    indirect=["model"],
)
def test_texts_go_on_from_blocks_that_came_back_as_from_those_that_stayed(model, lend, kv):
    prompt_ids = prompts(200, 150, 190, 140, 170, 160)
    drawn = {"temperature": 1.5, "seed": 5}
    roomy, small = Client(model, running=8, kv=kv), Client(model, running=2, kv=kv, cache_tokens=448, host=lend().lend("m"))
    for c in (roomy, small):
        for p in prompt_ids:
            c.tokens(c.ask(p, 70 if kv == "16" else 9, **drawn))
    before = held(small)
    for i, p in enumerate(prompt_ids):
        expected, output = (c.follow(c.ask(p, 9, **drawn))[0] for c in (roomy, small))
        assert [e.token for e in output] == [e.token for e in expected]
        assert output[0].cached == expected[0].cached > 0, i
    after, stats = held(small), small.engine.stats()
    assert stats.host_hits > 0 == roomy.engine.stats().host_hits
    assert any(k in before for k in after)
    assert all(torch.equal(after[k], before[k]) for k in after if k in before)
    for c in (roomy, small):
        c.engine.stop(0)
    assert roomy.engine.keep() is None


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_the_next_engine_of_the_same_model_goes_on_from_the_saved_blocks(model, lend):
    memory, asked = lend(), prompts(200, 150, 190)
    first = Client(model, running=2, host=(lent := memory.lend("m")))
    expected = first.tokens(*[first.ask(p, 20) for p in asked])
    first.engine.stop(0)
    kept = first.engine.keep()
    memory.take_back("m", lent, kept)
    assert memory.kept_bytes("m") == kept.bytes > 0
    later = Client(model, running=2, host=memory.lend("m"))
    output = later.follow(*[later.ask(p, 20) for p in asked])
    assert [[e.token for e in events] for events in output] == expected
    assert [events[0].cached for events in output] == [192, 128, 128]
    assert later.engine.stats().host_hits == 448
    later.engine.stop(0)


ALL = {"llama": "another model", "gemma3_text": "ngram", "lfm2": "another model"}


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.more), *list(ALL)[1:]], indirect=True)
def test_adapters_drafts_and_blocks_in_host_memory_together(models, model, lend, tmp_path, request):
    """Each text is that of the merged model alone, also by the next engine, which has the adapters in another order."""
    kind, names = request.node.callspec.params["model"], ("none", "a", "b")
    folders = {n: adapter(tmp_path / n, model, seed) for seed, n in enumerate(names[1:])}
    begin, memory, expected = prompts(140)[0], lend(), {}
    requests = [begin + p if i % 2 else p for i, p in enumerate(prompts(70, 90, 110, 130))]
    for name in names:
        merged = build(kind, **KINDS[kind])
        for layer, (A, B) in read_adapter(folders[name]).factors.items() if name != "none" else ():
            merged.get_submodule(layer).weight.data += B @ A
        alone = Client(merged, running=1)
        expected |= {(name, i): alone.tokens(alone.ask(p, 20))[0] for i, p in enumerate(requests)}
        alone.engine.stop(0)
    assert len(set(map(tuple, expected.values()))) == len(expected)
    for order in (["none", "a", "b"], ["none", "b", "a"]):
        own = build(kind, **KINDS[kind])
        adapt(plan_of(own), [read_adapter(folders[n], n) for n in order[1:]])
        drafter = ModelDrafter(plan_of(models["llama"]), "another", 320) if ALL[kind] != "ngram" else "ngram"
        c = Client(own, running=3, cache_tokens=512, host=(lent := memory.lend("m")), draft=drafter)
        if drafter != "ngram":
            always(c)
        todo = random.Random(len(order[1])).sample(list(expected) * 2, 14)
        numbers = [c.engine.submit(Request(tuple(requests[i]), 20, adapter=order.index(n))) for n, i in todo]
        assert c.tokens(*numbers) == [expected[t] for t in todo]
        assert c.engine.stats().host_hits > 0
        c.engine.stop(0)
        memory.take_back("m", lent, c.engine.keep())


def test_a_deterministic_engine_has_no_use_for_it(model, lend):
    c = Client(model, running=2, deterministic=True, host=lend().lend("m"))
    c.tokens(c.ask(prompts(100)[0], 5))
    c.engine.stop(0)
    assert c.engine.keep() is None


def test_host_blocks_of_a_changed_model_are_not_reused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    lent = HostMemory(1 << 20, 1).lend("m")

    def known(by=lent, **how):
        return keyed({"kv": "16", "prefer": "balanced", "host": by} | how, "m", str(tmp_path))["host"]

    mine = replace(lent, kept=Kept(known().key, (1,), ([],), 0))
    assert known(mine).kept is mine.kept
    assert known(mine, prefer="first-token").kept is mine.kept
    assert known(mine, kv="4").kept is None
    assert known(mine, act="int8").kept is None
    (tmp_path / "model.safetensors").write_bytes(b"others!")
    assert known(mine).kept is None


def test_host_blocks_of_another_draft_head_are_not_reused(tmp_path):
    """Its keys and values lie in the blocks, too: with a head that came, went or changed all places are others."""
    lent, head = HostMemory(1 << 20, 1).lend("m"), tmp_path / "draft" / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    head.parent.mkdir()
    for draft in ("auto", str(head.parent)):
        keys = []
        for there in (None, b"a head", b"another", None):
            head.unlink(missing_ok=True)
            if there is not None:
                head.write_bytes(there)
            folder = str(tmp_path) if draft == "auto" else ""
            keys.append(keyed({"kv": "16", "draft": draft, "host": lent}, "m", folder)["host"].key)
        assert keys[0] == keys[3]
        assert len(set(keys)) == 3


def memory_files():
    """The sizes of the files in memory that this process has open, by their descriptor."""
    links = [p for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    return {p.name: os.stat(p).st_size for p in links if "lowq-kv-host" in os.readlink(p)}


@pytest.mark.half_of("seed")
@pytest.mark.parametrize("seed", range(20))
def test_all_files_together_are_never_larger_than_the_bound(seed):
    rng, bytes_, others = random.Random(seed), 1 << 20, memory_files()
    memory, using = HostMemory(bytes_, rng.choice([1, 2, 4, 9])), {}
    for _ in range(200):
        name = rng.choice("abcdefgh")
        if name in using and rng.random() < 0.7:
            lent = using.pop(name)
            kept = rng.choice([None, Kept(b"", (1,), ([],), lent.room // 2)])
            memory.take_back(name, lent, kept)
            memory.take_back(name, lent, None)  # a second time changes nothing
            assert memory.kept_bytes(name) == (kept.bytes if kept else 0)
        else:  # an engine that died has given nothing back
            lent = memory.lend(name)
            using.pop(name, None)
            if lent is not None:
                using[name] = lent
                assert os.stat(lent.path).st_size == lent.room
        sizes = [size for file, size in memory_files().items() if file not in others]
        unused = [n for n in "abcdefgh" if memory.kept_bytes(n)]
        assert sum(sizes) <= bytes_
        assert len(sizes) == len(using) + len(unused)
        assert all(Path(lent.path).exists() for lent in using.values())
    memory.close()
    assert not any(Path(lent.path).exists() for lent in using.values())


def test_a_record_gives_the_least_recently_used_place():
    host = HostBlocks(2)
    assert [host.put(n) for n in (b"a", b"b", b"a", b"c")] == [1, 2, 0, 2]
    assert [host.find(n) for n in (b"a", b"b", b"c")] == [1, 0, 2]
    taken = host.take(b"a"), host.take(b"c")
    assert host.put(b"d") == 0
    for place in taken:
        host.give_back(place)
    assert (host.put(b"d"), host.used) == (1, 1)
    again = HostBlocks(2)
    again.restore(host.record())
    assert [again.put(n) for n in (b"d", b"e", b"f")] == [0, 2, 1]


# ---- a server


def ask(server, model):
    prompt = " ".join(["Once upon a time there was a king"] * 12)
    answer = server.post("completions", {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0})
    assert answer.status_code == 200, answer.text
    output = answer.json()
    return output["choices"][0]["text"], output["usage"]["prompt_tokens_details"]["cached_tokens"]


def engine_of(server):
    """The process of the one engine that has a model: it has begun before the one that waits for the next."""
    return engines_of(server.process.pid)[0]


@pytest.mark.slow
def test_a_model_that_was_unloaded_remembers_what_it_read_but_not_one_that_was_killed(tmp_path, start_on):
    two = make_models(tmp_path, ("ash", "birch"))
    line = (two / "ash", "--models", two, "--memory", PROCESS + (256 << 20), "--cache-tokens", 1024, "--kv-host", "64MB")
    s = start_on(*line, forked=False)
    assert any("up to 64.0 MB of host memory" in line for line in s.said)
    ash, cached = ask(s, "ash")
    assert cached == 0
    birch, cached = ask(s, "birch")
    assert (cached, birch != ash) == (0, True)
    output = {m["id"]: m["kv_host_bytes"] for m in httpx.get(f"{s.url}/v1/models", timeout=30).json()["data"]}
    assert output["ash"] > 0 == output["birch"]
    assert f'lowq_kv_host_bytes{{model="ash"}} {float(output["ash"])}' in httpx.get(f"{s.url}/metrics", timeout=30).text
    assert ask(s, "ash") == (ash, 64)
    os.kill(engine_of(s), signal.SIGKILL)
    end = time.monotonic() + 60
    while s.post("completions", {"model": "ash", "prompt": "x", "max_tokens": 1}).status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert ask(s, "ash") == (ash, 0)
    hits = re.search(r'lowq_kv_host_hit_tokens_total\{model="ash"\} (\S+)', httpx.get(f"{s.url}/metrics", timeout=30).text)
    assert float(hits[1]) == 64
    assert s.stop() == 0
