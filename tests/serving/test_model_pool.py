"""Many models in one server: swaps, queues, engines and clients that die, the file that names them."""

import asyncio
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import httpx
import pytest
from engine_processes import engines_of
from saying import Saying, byte_tokenizer
from swaps import NAMES, TWO, make_models

from lowq_cli.engine.model_record import file_facts
from lowq_cli.files.source import DEMO, open_source
from lowq_cli.serving.catalog import Offer, gather, read_config, seconds, size
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.opening import Arguments
from lowq_cli.serving.http.place import PROCESS, State
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.served_model import Facts, Refused, ServedModel
from lowq_packers.errors import LowqError, NotFoundError, UsageError

SCRIPT = Path(__file__).parents[1] / "fuzz" / "swaps.py"


class Scripted:
    """The result of `load`: a model that answers with one letter, once the test lets it finish loading."""

    def __init__(self, offer, log, fails=None):
        self.offer, self.log, self.fails, self.go = offer, log, fails, threading.Event()
        self.go.set()
        log.append(("begin", offer.name))

    def finish(self, loop, done):
        assert self.go.wait(60)
        if self.fails:
            raise LowqError(self.fails)
        model = ServedModel(Engine(self.log, self.offer.name), byte_tokenizer(), self.offer.name, frozenset())
        model.hub.start(loop)
        return model

    def stop(self):
        self.go.set()


class Engine(Saying):
    """One that says when it is stopped."""

    def __init__(self, log, name):
        super().__init__([65])
        self.log, self.called, self.closed = log, name, ""

    def stop(self, seconds):
        self.log.append(("stop", self.called))


def pool_of(names, room=2, **how):
    """(pool, log) with room for so many."""
    log, made = [], {}

    def load(offer):
        made[offer.name] = Scripted(offer, log, how.get("fails", {}).get(offer.name))
        return made[offer.name]

    more = {k: v for k, v in how.items() if k in ("keep_alive", "waiting", "wait_s")}
    pinned = how.get("pinned", ())
    result = {n: Offer(n, f"/nowhere/{n}", pin=n in pinned) for n in names}
    pool = ModelPool(result, names[0], load, room * PROCESS + 1, **more)
    return pool, log


async def use(pool, name, held=None):
    async with pool.lease(name) as model:
        if held is not None:
            await held.wait()
        return model.name


def run(what):
    return asyncio.run(asyncio.wait_for(what, 60))


def test_the_least_recently_used_goes_first_and_pins_stay():
    async def go():
        pool, log = pool_of("abcd", pinned="b")
        await pool.start(lambda n, of: None)
        for name in "acd":
            assert await use(pool, name) == name
        assert [n for what, n in log if what == "stop"] == ["a", "c"]
        assert {n: p.state for n, p in pool.places.items()} == {
            "a": State.ABSENT, "b": State.READY, "c": State.ABSENT, "d": State.READY
        }  # fmt: skip

    run(go())


def test_running_answers_finish_and_new_requests_wait():
    async def go():
        pool, log = pool_of("abc")
        await pool.start(lambda n, of: None)
        held = asyncio.Event()
        first = [asyncio.create_task(use(pool, n, held)) for n in "ab"]
        while not all(pool.places[n].beginning for n in "ab"):
            await asyncio.sleep(0)
        third = asyncio.create_task(use(pool, "c"))
        while pool.places["a"].state is not State.DRAINING:
            await asyncio.sleep(0)
        late = asyncio.create_task(use(pool, "a"))
        await asyncio.sleep(0.05)
        assert not third.done()
        assert ("stop", "a") not in log
        held.set()
        assert await asyncio.gather(*first, third, late) == ["a", "b", "c", "a"]
        assert log.index(("stop", "a")) < log.index(("begin", "c"))

    run(go())


def test_requests_beyond_the_waiting_limit_get_retry_after():
    async def go():
        pool, _ = pool_of("ab", room=1, waiting=3)
        await pool.start(lambda n, of: None)
        held = asyncio.Event()
        busy = asyncio.create_task(use(pool, "a", held))
        while not pool.places["a"].beginning:
            await asyncio.sleep(0)
        waiting = [asyncio.create_task(use(pool, "b")) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(Refusal) as refused:
            await use(pool, "b")
        assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "5"})
        held.set()
        assert await asyncio.gather(busy, *waiting) == ["a", "b", "b", "b"]

    run(go())


def test_a_request_that_waited_too_long_gets_an_error_and_leaves_the_queue():
    async def go():
        pool, _ = pool_of("ab", room=1, wait_s=60)
        await pool.start(lambda n, of: None)
        held = asyncio.Event()
        busy = asyncio.create_task(use(pool, "a", held))
        while not pool.places["a"].beginning:
            await asyncio.sleep(0)
        pool.wait_s = 0.05
        with pytest.raises(Refusal) as refused:
            await use(pool, "b")
        assert refused.value.status == 503
        assert not pool.places["b"].waiters
        held.set()
        await busy

    run(go())


def test_a_model_that_cannot_be_loaded_is_reported_and_others_are_served():
    async def go():
        pool, log = pool_of("ab", fails={"b": "its file is damaged"})
        await pool.start(lambda n, of: None)
        for _ in range(2):  # the second request fails without another attempt
            with pytest.raises(Refusal) as refused:
                await use(pool, "b")
            assert "its file is damaged" in refused.value.message
            assert refused.value.headers["Retry-After"] in ("1", "2")
        assert log.count(("begin", "b")) == 1
        assert await use(pool, "a") == "a"
        pool.places["b"].again = 0.0  # the pause is over
        with pytest.raises(Refusal):
            await use(pool, "b")
        assert log.count(("begin", "b")) == 2

    run(go())


def test_an_engine_that_died_is_loaded_again_by_the_next_request():
    async def go():
        pool, log = pool_of("ab")
        await pool.start(lambda n, of: None)
        await use(pool, "a")
        await use(pool, "b")
        pool.places["a"].model.engine.closed = "killed by signal 9"
        with pytest.raises(Refusal):
            await use(pool, "a")
        assert pool.places["a"].state is State.FAILED
        assert await use(pool, "b") == "b"
        pool.places["a"].again = 0.0
        assert await use(pool, "a") == "a"
        assert log.count(("begin", "a")) == 2

    run(go())


def test_only_failures_in_a_row_make_the_pause_longer():
    """An engine that has answered was sound: after its end the next request loads the model at once."""

    async def go():
        pool, _ = pool_of("ab", fails={"b": "its file is damaged"})
        await pool.start(lambda n, of: None)
        place, pauses = pool.places["a"], []

        async def die(answers):
            await use(pool, "a")
            place.model.hub.answered = answers
            place.model.engine.closed = "killed by signal 9"
            began = time.monotonic()
            pool.look()
            pauses.append(round(place.again - began) if place.state is State.FAILED else 0)
            place.again = 0.0

        for answers in (False, False, False, True, False, True):
            await die(answers)
        assert pauses == [1, 2, 4, 0, 1, 0]
        assert await use(pool, "a") == "a"
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            with pytest.raises(Refusal) as refused:
                await use(pool, "b")
            assert refused.value.headers["Retry-After"] in (str(pause), str(pause + 1))
            pool.places["b"].again = 0.0

    run(go())


def test_failures_before_a_good_answer_are_forgotten_when_the_model_is_unloaded():
    async def go():
        pool, _ = pool_of("ab", room=1)
        await pool.start(lambda n, of: None)
        await use(pool, "a")
        place = pool.places["a"]
        place.failures, place.model.hub.answered = 3, True
        await use(pool, "b")
        assert (place.state, place.failures) == (State.ABSENT, 0)

    run(go())


@pytest.mark.parametrize("how", ["changed", "changed and failing", "gone", "gone and failing"])
def test_offers_that_are_read_again_while_their_model_is_loaded(how):
    """The model that is loaded is not the one that is offered now: its requests get that one, or learn that there is none."""

    async def go():
        made = {}

        def load(offer):
            made[offer.path] = one = Scripted(
                offer, log, "its file is damaged" if offer.path == "/old" and "failing" in how else None
            )
            if offer.path == "/old":
                one.go.clear()
            return one

        log = []
        pool = ModelPool({"a": Offer("a", "/old"), "b": Offer("b", "/b")}, "b", load, PROCESS + 1)
        await pool.start(lambda n, of: None)
        asking = asyncio.create_task(use(pool, "a"))
        while pool.places["a"].loading is None:
            await asyncio.sleep(0)
        new = {"b": Offer("b", "/b")} | ({"a": Offer("a", "/new")} if "changed" in how else {})
        pool.replace_all(new, "b")
        made["/old"].go.set()
        if "changed" in how:
            assert await asking == "a"
            assert list(made) == ["/old", "/new"]
        else:
            with pytest.raises(Refusal) as refused:
                await asking
            assert refused.value.status == 404
        assert await use(pool, "b") == "b"
        assert set(pool.places) == set(new)
        loaded = ["a"] * (how == "changed" or how == "gone") + ["a"] * ("changed" in how)
        assert [n for what, n in log if what == "stop"] == loaded  # b took the room of the last one

    run(go())


def test_a_model_that_is_not_there_unloads_no_other():
    async def go():
        pool, log = pool_of("ab", room=1)

        def check(offer):
            if offer.name == "b":
                raise LowqError("there is no folder /nowhere/b")

        pool.loads.check = check
        await pool.start(lambda n, of: None)
        assert await use(pool, "a") == "a"
        with pytest.raises(Refusal, match="there is no folder"):
            await use(pool, "b")
        assert log == [("begin", "a")]
        assert pool.places["a"].state is State.READY

    run(go())


def test_a_mended_adapter_does_not_hold_up_other_requests(tmp_path):
    """A request loads its model again only while the model answers no other."""

    async def go():
        pool, log = pool_of("a")
        await pool.start(lambda n, of: None)
        held = asyncio.Event()
        running = asyncio.create_task(use(pool, "a", held))
        while not pool.places["a"].beginning:
            await asyncio.sleep(0)
        pool.places["a"].model.facts = Facts(refused={"german": Refused.of(str(tmp_path), "it is empty")})
        (tmp_path / "adapter_config.json").write_text("{}")
        os.utime(tmp_path / "adapter_config.json", (1e9, 1e9))
        assert await use(pool, "a") == "a"
        assert log == [("begin", "a")]
        held.set()
        await running
        assert await use(pool, "a") == "a"
        assert log == [("begin", "a"), ("stop", "a"), ("begin", "a")]

    run(go())


@pytest.mark.parametrize(
    ("change", "device", "loads"),
    [
        (lambda file: file.write_bytes(b"5678"), "cpu", 2),
        (lambda file: file.write_bytes(b"5678"), "cuda:0", 1),  # holds a copy of the weights
        (lambda file: (file.with_name("new").write_bytes(b"5678"), file.with_name("new").rename(file)), "cpu", 1),
        (Path.unlink, "cpu", 1),
        (lambda file: file.with_name("notes.txt").write_text(""), "cpu", 1),
    ],
    ids=["written over", "on a GPU", "replaced", "removed", "another file"],
)
def test_a_model_whose_mapped_weights_were_written_over_is_loaded_again(tmp_path, change, device, loads):
    """A request that comes then waits for the load; none gets what was computed with the pages of two files."""
    (tmp_path / "model.safetensors").write_bytes(b"1234")

    async def go():
        pool, log = pool_of("a")
        await pool.start(lambda n, of: None)
        assert await use(pool, "a") == "a"
        pool.places["a"].model.facts = Facts(device=device, files=file_facts(str(tmp_path)))
        assert await use(pool, "a") == "a"
        change(tmp_path / "model.safetensors")
        assert await use(pool, "a") == "a"
        assert log.count(("begin", "a")) == loads

    run(go())


def test_a_memory_too_small_for_any_model_holds_one_at_a_time():
    async def go():
        pool, log = pool_of("ab", room=0)
        await pool.start(lambda n, of: None)
        assert [await use(pool, name) for name in "aba"] == ["a", "b", "a"]
        assert log == [("begin", "a"), ("stop", "a"), ("begin", "b"), ("stop", "b"), ("begin", "a")]
        pool.update({"a": Offer("a", "/nowhere/a", pin=True)})
        while (len(log), pool.places["a"].state) != (7, State.READY):
            await asyncio.sleep(0)
        with pytest.raises(Refusal, match=r"536\.9 MB do not fit next to the pinned models into 1 B; pin fewer"):
            await use(pool, "b")
        assert await use(pool, "a") == "a"

    run(go())


def test_an_offer_that_was_mended_is_loaded_without_a_pause():
    async def go():
        pool, _ = pool_of("ab", fails={"b": "its file is damaged"})
        await pool.start(lambda n, of: None)
        with pytest.raises(Refusal):
            await use(pool, "b")
        pool.loads.load = lambda offer: Scripted(offer, [])
        pool.update({"b": Offer("b", "/elsewhere/b")})
        assert await use(pool, "b") == "b"

    run(go())


def test_a_pinned_model_is_loaded_again_without_a_request():
    """After it died, after it could not be loaded, when it changed, and when the file newly pins it."""

    async def go():
        pool, log = pool_of("ab", pinned="b")
        await pool.start(lambda n, of: None)
        place = pool.places["b"]

        async def ready(times):
            while (log.count(("begin", "b")), place.state) != (times, State.READY):
                await asyncio.sleep(0)

        await ready(1)
        place.model.engine.closed = "killed by signal 9"
        pool.look()
        assert "killed by signal 9" in pool.not_ready()
        place.again = 0.0
        pool.look()
        await ready(2)
        pool.update({"b": Offer("b", "/nowhere/b", {"running": 2}, pin=True)})
        await ready(3)
        pool.update({"a": Offer("a", "/nowhere/a", pin=True)})
        while pool.places["a"].state is not State.READY:
            await asyncio.sleep(0)
        assert not pool.not_ready()

    run(go())


def test_errors_around_a_model_do_not_reach_its_requests():
    """One where the next process is prepared, one where a model is unloaded; an error of ours in the task ends the server."""

    async def go():
        pool, log = pool_of("ab", room=1)

        def broken(*_):
            raise OSError("no more processes")

        pool.loads.prepare = broken
        await pool.start(lambda n, of: None)
        assert await use(pool, "a") == "a"
        pool.places["a"].model.end = broken
        assert await use(pool, "b") == "b"
        assert await use(pool, "a") == "a"
        assert pool.look() == ""
        for here, other in ("ab", "ba"):
            pool.places[here].model.engine.stats = broken  # its last numbers are not known; its process ends all the same
            assert await use(pool, other) == other
        assert log[-4:] == [("stop", "a"), ("begin", "b"), ("stop", "b"), ("begin", "a")]
        assert b"lowq" in pool.reports.metrics.text()
        assert all(p.task is None and p.state in (State.ABSENT, State.READY) for p in pool.places.values())
        pool.loads.say = pool.loads.failed = broken
        waiting = asyncio.create_task(use(pool, "b"))
        while not (why := pool.look()):
            await asyncio.sleep(0)
        assert why == "models are not loaded any more: no more processes"
        pool.close()
        with pytest.raises(Refusal):
            await waiting

    run(go())


@pytest.mark.parametrize("how", ["unloaded", "died"])
def test_a_model_that_has_left_is_freed(how):
    """At once, and not whenever Python collects the next time: tokenizers take up to hundreds of megabytes."""

    async def go():
        pool, _ = pool_of("ab", room=1)
        await pool.start(lambda n, of: None)
        async with pool.lease("a") as model:
            left = [weakref.ref(x) for x in (model, model.engine, model.tokenizer, model.hub, model.grammars)]
            model.syntax("")
        del model
        if how == "died":
            pool.places["a"].model.engine.closed = "killed by signal 9"
            pool.look()
        assert await use(pool, "b") == "b"
        end = time.monotonic() + 20
        while any(ref() is not None for ref in left):
            assert time.monotonic() < end, [gc.get_referrers(ref()) for ref in left if ref() is not None]
            await asyncio.sleep(0.01)

    gc.disable()
    try:
        run(go())
    finally:
        gc.enable()


def test_an_alias_is_another_name_of_the_same_loaded_model():
    async def go():
        pool, log = pool_of("ab")
        await pool.start(lambda n, of: None)
        pool.update({"a": Offer("a", "/nowhere/a", aliases=("gpt", "claude"))})
        assert [await use(pool, n) for n in ("gpt", "a", "claude")] == ["a", "a", "a"]
        assert [n for what, n in log if what == "begin"] == ["a"]
        listed = {m["id"]: (m.get("parent"), m["loaded"]) for m in pool.entries()}
        assert listed == {"a": (None, True), "gpt": ("a", True), "claude": ("a", True), "b": (None, False)}
        with pytest.raises(Refusal):
            await use(pool, "gpt-5")

    run(go())


def test_an_unused_model_is_unloaded():
    async def go():
        pool, log = pool_of("ab", keep_alive=0.0, pinned="b")
        await pool.start(lambda n, of: None)
        await use(pool, "a")
        while pool.places["b"].state is not State.READY:
            await asyncio.sleep(0)
        pool.look()
        await pool.places["a"].task
        assert log[-1] == ("stop", "a")
        assert pool.places["b"].state is State.READY

    run(go())


def test_a_model_is_unloaded_on_request_when_its_requests_have_ended_and_a_pinned_one_is_not():
    async def go():
        pool, log = pool_of("ab", pinned="b")
        await pool.start(lambda n, of: None)
        assert await pool.unload("a")  # nothing is loaded yet
        async with pool.lease("a"):
            assert await pool.unload("a")
            await asyncio.sleep(0)
            assert ("stop", "a") not in log
        await pool.places["a"].task
        assert log[-1] == ("stop", "a")
        assert not await pool.unload("b")
        await use(pool, "a")
        with pytest.raises(Refusal, match="not served here"):
            await pool.unload("c")

    run(go())


def test_offers_that_are_read_again():
    """What is the same stays loaded; what changed is loaded anew when it is asked for; what is gone is refused."""

    async def go():
        pool, log = pool_of("abc", room=3)
        await pool.start(lambda n, of: None)
        for name in "abc":
            await use(pool, name)
        old = {n: p.offer for n, p in pool.places.items()}
        new = {"a": old["a"], "b": Offer("b", "/nowhere/b", {"running": 2}), "d": Offer("d", "/nowhere/d")}
        pool.replace_all(new, "d")
        await asyncio.gather(*(p.task for p in list(pool.places.values()) if p.task))
        assert sorted(n for what, n in log if what == "stop") == ["b", "c"]
        with pytest.raises(Refusal) as refused:
            await use(pool, "c")
        assert refused.value.status == 404
        assert await use(pool, None) == "d"
        assert await use(pool, "b") == "b"
        assert log.count(("begin", "a")) == 1
        assert "c" not in pool.places

    run(go())


def test_models_written_since_are_listed_and_an_unknown_name_costs_one_look():
    async def go():
        pool, _ = pool_of("a")
        looks = []
        pool.refresh = lambda: looks.append(1) or {"new": Offer("new", "/nowhere/new")}
        await pool.start(lambda n, of: None)
        assert await use(pool, "new") == "new"
        for name in ("x", "y", "z"):
            with pytest.raises(Refusal) as refused:
                await use(pool, name)
            assert refused.value.status == 404
        assert looks == [1]

    run(go())


# ---- the file

TOML = """
default = "small"
memory = "1.5GB"
keep_alive = "1h30m"
folders = ["more"]
[models.small]
path = "one"
pin = true
kv = "fp8"
max_batch = 3
temperature = 0.5
keep_alive = 5
"""


def test_the_file(tmp_path):
    for folder in ("one", "more/two", "more/three", "more/no"):
        (tmp_path / folder).mkdir(parents=True)
        if not folder.endswith("no"):
            (tmp_path / folder / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    (tmp_path / "models.toml").write_text(TOML)
    config = read_config(tmp_path / "models.toml")
    assert (config.default, config.memory, config.keep_alive) == ("small", 1_500_000_000, 5400.0)
    result = gather(config)
    small = result["small"]
    assert (small.pin, small.keep_alive, dict(small.draw)) == (True, 5.0, {"temperature": 0.5})
    assert dict(small.how) == {"running": 3, "kv": "fp8"}
    assert {"two", "three"} <= set(result)
    assert not {"one", "no"} & set(result)  # the first under its other name alone
    assert result["two"].published() == {"max_model_len": 77, "chat": False, "features": ["completions"]}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("defualt = 'x'", "defualt is not known"),
        ("[models.x]", "models.x needs a path"),
        ("[models.x]\npath = 3", "path = 3 must be str"),
        ("[models.x]\npath = 'a'\ntemperature = -1", "temperature=-1"),
        ("[models.x]\npath = 'a'\npin = 1", "pin = 1 must be bool"),
        ("[models.x]\npath = 'a'\nmax_batch = 0", "m.toml: models.x: max_batch = 0 must be at least 1"),
        ("[models.x]\npath = 'a'\nkv = 8", "m.toml: models.x: kv = 8 must be one of 16, fp8, 4"),
        ("memory = 'lots'", "memory = lots is not a size"),
        ("kv_host = '0GB'", "kv_host = 0GB is not a size"),
        ("[models.x]\npath = 'y'\n[models.y]\npath = 'x'", r'path = y is a model of this file; write aliases = \["x"\] there'),
        ("[models.x]\npath = 'a'\naliases = ['y']\n[models.y]\npath = 'b'", "y is the name of several models"),
        ("[models.x]\npath = 'a'\nlora = {x = 'b'}", "x is the name of several models, aliases or adapters"),
        ("[models.x]\npath = 'a'\naliases = ['']", "or an adapter is empty"),
        ("[models.x]\npath = 'a'\naliases = [3]", "aliases must be a list of names"),
        ("[models.x]\npath = 'a'\nlora = {y = 3}", "lora.y must be the path of a folder"),
        ("keep_alive = 'soon'", "keep_alive = soon is not a time"),
        ("a = ", "is not TOML"),
        (f"[models.x]\npath = '{'a' * 3000}'", "models.x: .*: File name too long"),
    ],
)
def test_mistakes_in_the_file_are_refused_by_name(tmp_path, text, line):
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(UsageError, match=line):
        read_config(tmp_path / "m.toml")


def test_sizes_and_times():
    assert [size(t, "") for t in ("40GB", "1.5 GiB", "512m", 7)] == [40 * 10**9, 3 << 29, 512 * 10**6, 7]
    assert [seconds(t, "") for t in ("10m", "1h30m", "250ms", 3, "never")] == [600.0, 5400.0, 0.25, 3.0, float("inf")]


# ---- real processes


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("four"))


@pytest.fixture
def many(four, start_on):
    """A server of the four with room for two."""
    return start_on(four / "ash", "--models", four, "--memory", TWO, "--cache-tokens", 2048, "--deterministic", forked=False)


def test_a_server_whose_default_model_does_not_load_starts_with_the_others(four, tmp_path, start_on):
    shutil.copytree(four / "ash", tmp_path / "good")
    (tmp_path / "bad.gguf").write_bytes(b"no GGUF file")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    server = start_on(f"--models={tmp_path}", "--cache-tokens", 2048)
    models = {m["id"]: m for m in httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]}
    assert next(iter(models)) == "good"
    body = {"prompt": "Once", "max_tokens": 2}
    for name in ("bad", "cut"):
        refused = httpx.post(f"{server.url}/v1/completions", json=body | {"model": name}, timeout=60)
        assert refused.status_code >= 400
        assert f"{name}.gguf" in refused.json()["error"]["message"]
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["model"] == "good"
    sizes = {m["name"]: m["size"] for m in httpx.get(f"{server.url}/api/tags", timeout=30).json()["models"]}
    on_disk = sum(f.stat().st_size for f in (tmp_path / "good").glob("*.safetensors"))
    assert {n: sizes[n] for n in ("good", "bad", "cut")} == {"good": on_disk, "bad": 12, "cut": 8}


def states(server):
    return {m["id"]: m["state"] for m in httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]}


def until(true, seconds=90):
    end = time.monotonic() + seconds
    while not (result := true()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result


def whole(connection):
    """An answer whose body is JSON, as it comes."""
    came = b""
    while not came.endswith(b"}") and (more := connection.recv(1 << 16)):
        came += more
    return came


def text_of(server, model, **more):
    answer = server.post("completions", {"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.more
def test_none_is_lost_and_none_is_mixed_up():
    """As tests/fuzz/swaps.py does with 2,000 requests."""
    done = subprocess.run([sys.executable, SCRIPT, "--requests", "8", "--users", "6"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["counts"]["answers"] > 4


@pytest.mark.slow
def test_a_dead_engine_does_not_affect_others(many, four):
    """An engine that answers, the process that stands by, clients that wait; then the server, whose engines end."""
    assert states(many) == {"ash": "ready", "birch": "absent", "cedar": "absent", "doum": "absent"} | {
        n: "absent" for n in states(many) if n not in NAMES
    }
    ash = text_of(many, "ash")
    birch = text_of(many, "birch")
    assert ash != birch
    of_ash = engines_of(many.process.pid)[0]
    stream = {"model": "ash", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{many.url}/v1/completions", json=stream, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(of_ash, signal.SIGKILL)
        assert any("was killed by signal 9" in line for line in lines)
    assert text_of(many, "birch") == birch
    failed = many.post("completions", {"model": "ash", "prompt": "Once", "max_tokens": 1})
    if failed.status_code != 200:  # 200: on a busy machine the wait after a death is over by now
        assert (failed.status_code, int(failed.headers["retry-after"]) >= 1) == (503, True)
    assert httpx.get(f"{many.url}/health", timeout=30).status_code == 200

    def again(model):
        answer = many.post("completions", {"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0})
        return answer.status_code == 200 and answer.json()["choices"][0]["text"]

    assert until(partial(again, "ash")) == ash

    address = ("127.0.0.1", int(many.url.rpartition(":")[2]))
    raw = json.dumps({"model": "cedar", "prompt": "Once", "max_tokens": 2}).encode()
    with socket.create_connection(address) as leaves:  # while its model is loaded
        leaves.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: states(many)["cedar"] == "loading")
    until(lambda: httpx.get(f"{many.url}/health", timeout=30).json()["waiting"] == 0)
    until(lambda: states(many)["cedar"] == "ready")
    assert list(states(many).values()).count("ready") == 2

    with socket.create_connection(address) as waits:
        raw, standby = raw.replace(b"cedar", b"doum"), until(lambda: engines_of(many.process.pid)[2:])[-1]
        os.kill(standby, signal.SIGSTOP)  # it loads the next one, and would be done before it is killed
        waits.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: states(many)["doum"] == "loading")
        os.kill(standby, signal.SIGKILL)
        assert whole(waits).startswith(b"HTTP/1.1 200")  # it had not read what to load: a new process did
    assert text_of(many, "birch") == birch

    left = engines_of(many.process.pid)
    many.process.send_signal(signal.SIGKILL)
    many.process.wait(60)
    until(lambda: not any(Path(f"/proc/{p}").exists() for p in left))


def test_a_server_of_many_reads_its_file_again_and_ends_while_it_loads(four, tmp_path, start_on):
    file = tmp_path / "models.toml"
    file.write_text(f'default = "one"\n[models.one]\npath = "{four / "ash"}"\n')
    s = start_on(four / "birch", "--config", file, forked=False)
    assert {"birch", "one"} <= set(states(s))
    of_one = engines_of(s.process.pid)[0]
    file.write_text("nonsense")
    s.process.send_signal(signal.SIGHUP)
    s.said_last("nothing has changed: ")
    file.write_text(f'[models.two]\npath = "{four / "cedar"}"\n')
    s.process.send_signal(signal.SIGHUP)
    until(lambda: any("read again" in line for line in s.said))
    assert "one" not in states(s)
    assert s.post("completions", {"model": "one", "prompt": "x"}).status_code == 404
    raw = json.dumps({"model": "two", "prompt": "Once", "max_tokens": 2}).encode()
    standby = until(lambda: [process for process in engines_of(s.process.pid) if process != of_one])[-1]
    os.kill(standby, signal.SIGSTOP)  # it would have loaded the model before the server ends
    with socket.create_connection(("127.0.0.1", int(s.url.rpartition(":")[2]))) as waits:
        waits.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: states(s)["two"] == "loading")
        assert s.stop() == 0
        assert b"the server is stopping" in whole(waits)


@pytest.mark.parametrize("name", ["m", "org/m"])
def test_a_folder_that_is_gone_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    """A relative path has the form of a hub id, under which anybody may have published something."""
    shutil.copytree(DEMO, tmp_path / name)
    (tmp_path / "models.toml").write_text(f'[models.second]\npath = "{name}"\n')
    monkeypatch.chdir(tmp_path)
    alone = Arguments(name, (), None, None, None, None)
    listed = Arguments(None, (), "models.toml", None, None, None)
    before = [arguments.read() for arguments in (alone, listed)]
    shutil.rmtree(name)
    assert [next(iter(offers.models.values())).path for offers in before] == [str(tmp_path / name)] * 2
    for read in (alone.read, lambda: open_source(before[1].models["second"].path)):  # as at SIGHUP; as for a request
        with pytest.raises(NotFoundError, match=f"there is no folder {tmp_path / name}"):
            read()
