"""Loads that a request waits for: it is answered first, and later loads of a model take over what earlier ones measured."""

import time
from copy import copy
from threading import Event, Thread
from types import SimpleNamespace
from unittest.mock import Mock

import counting
import pytest
import torch
from asking import Client, Replayed, alone, build, prompts

from lowq_cli.engine.plan import plan_of
from lowq_cli.serving import cache_allocator
from lowq_cli.serving.catalog import Offer
from lowq_cli.serving.continuous import ContinuousEngine
from lowq_cli.serving.http.loading import Loader, LoadingModel, keyed
from lowq_cli.serving.measurements import Measurements
from lowq_cli.serving.pass_sizes import PassSizes
from lowq_cli.serving.request import Draw, Request
from lowq_kernels.graphs import Graph


def test_a_later_load_gets_the_measurements_of_the_one_before(tmp_path):
    loader = Loader("cpu", {}, make=counting.load)
    for name in "abaa":
        model = loader.begin(Offer(name, str(tmp_path)))
        model.made().engine.start(lambda batch: None)
        model.stop()
    assert {name: one.beside for name, one in loader.measurements.items()} == {"a": 3, "b": 1}
    assert loader.measurements["b"].passes == {(1, 1, False): 0.001}  # timed after the start
    begun = loader.begin(Offer("a", str(tmp_path)))  # a load that is broken off changes nothing
    begun.stop()
    assert loader.measurements["a"].beside == 3


def test_measurements_hold_for_the_same_files_and_options(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def known(earlier, **how):
        return keyed({"kv": "16", "earlier": earlier, "host": None} | how, "m", str(tmp_path))["earlier"]

    first = known(Measurements())
    assert first.key
    assert not first.passes
    full = Measurements(first.key, 7, {(1, 1, False): 0.1})
    assert known(full) == full
    assert known(full, running=3) != full
    assert not known(full, running=3).passes
    assert known(full, later=True) == full  # a server's start and a load that a request waits for measure the same
    assert not known(full, lora={"german": "there"}).passes
    (tmp_path / "config.json").write_text("{ }")
    assert not known(full).passes
    assert keyed({"kv": "16"}, "m", str(tmp_path)) == {}


def test_loads_of_a_running_server_record_later_and_its_start_does_not(tmp_path):
    loader = Loader("cpu", {}, make=counting.load)
    start = LoadingModel(Offer("a", str(tmp_path)), "cpu", {}, True, measurements=loader.measurements, make=counting.load)
    asked = loader.begin(Offer("b", str(tmp_path)))
    for one in (start, asked):
        one.stop()
    assert [one.given[3]["later"] for one in (start, asked)] == [False, True]


GB = 1 << 30
KNOWN = Measurements(b"key", 5, {(1, 1, False): 0.1})


@pytest.mark.parametrize(
    ("how", "free", "trials", "launched"),
    [
        pytest.param({}, GB, 1, 0, id="at the start"),
        pytest.param({"later": True}, GB, 0, 1, id="first load"),
        pytest.param({"later": True, "most_bytes": GB // 8}, GB, 0, 1, id="by bytes"),
        pytest.param({"later": True}, 1 << 20, 1, 0, id="little room"),
        pytest.param({"later": True}, cache_allocator.ROOM + (1 << 20), 0, 1, id="room for any pass"),
        pytest.param({"later": True, "known": KNOWN}, GB, 0, 0, id="later load"),
        pytest.param({"later": True, "known": KNOWN}, 1 << 20, 0, 0, id="later load, little room"),
        pytest.param({"later": True, "known": Measurements(b"key", 0, KNOWN.passes)}, 1 << 20, 1, 0, id="memory unknown"),
    ],
)
def test_trial_passes_run_at_the_start_and_where_the_room_beside_the_cache_may_not_do(how, free, trials, launched, monkeypatch):
    model, runner = build("llama"), cache_allocator._runner
    plan, tokens = plan_of(model), None if "most_bytes" in how else 1024  # 0.5 MB
    on_gpu = copy(plan)
    on_gpu.device = torch.device("cuda")
    trial, launch_all = Mock(return_value=(7, None)), Mock()
    monkeypatch.setattr(cache_allocator, "_runner", lambda _, *given: runner(plan, *given))
    monkeypatch.setattr(cache_allocator, "_trial", trial)
    monkeypatch.setattr(cache_allocator, "launch_all", launch_all)
    monkeypatch.setattr(cache_allocator, "_free", lambda: GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, GB))
    if free > GB:
        monkeypatch.setattr(cache_allocator, "LITTLE", 0.0)
    cache = cache_allocator.make_cache(model, on_gpu, "16", 4, tokens, False, **how)
    assert (trial.call_count, launch_all.call_count) == (trials, launched)
    assert cache.tokens == (1024 if tokens else 4 * 512)
    assert cache.beside == (7 if trials else 5 if "known" in how else 0)
    assert cache.passes.token_budget.known == (how["known"].passes if "known" in how else {})


def test_trial_passes_wait_for_the_device_once_no_other_engine_records(monkeypatch):
    """CUDA refuses that wait meanwhile: an engine that is loaded while another one records could not start."""
    waited = Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", waited)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=0))
    trial = SimpleNamespace(sizes=SimpleNamespace(timed=[]), graph_bytes=lambda: 5, token_budget=None)
    monkeypatch.setattr(cache_allocator, "trial_runner", lambda *given: trial)
    monkeypatch.setattr(cache_allocator, "launches", lambda trial: [])
    plan, results = SimpleNamespace(device=torch.device("cuda")), []
    load = Thread(target=lambda: results.append(cache_allocator._trial(plan, "16", 4, 1024, False)))
    with Graph(Mock()).recording(None, (0, 1)):
        load.start()
        load.join(0.2)
        assert not waited.called
    load.join(20)
    assert results == [(5 + cache_allocator.BESIDE, None)]
    waited.assert_called_once_with(plan.device)


def test_the_passes_to_time_are_every_step_and_of_each_size_with_prompts_the_one_with_the_most_steps():
    sizes = PassSizes(16)
    timed, (steps, recorded, larger) = sizes.timed, ([1, 2, 4, 8, 16], sizes.totals[:9], [2048, 3072, 4096])
    assert timed == [(b, b, False) for b in steps] + [(16, M, False) for M in recorded] + [
        (16 if M == 4096 else 0, M, False) for M in larger
    ]
    assert set(timed[: -len(larger)]) <= set(sizes.keys)
    assert not set(timed[-len(larger) :]) & set(sizes.keys)


def test_a_first_load_answers_before_its_passes_are_recorded_and_timed(monkeypatch):
    """On a CPU, with recordings that are computed again. The request comes while the first of them is made."""
    model, (prompt,) = build("llama"), prompts(20)
    engine, log, under_way, go = ContinuousEngine(model, 4, running=2), [], Event(), Event()
    passes, engine.device = engine.passes, SimpleNamespace(type="cuda")
    engine._later, engine._unrecorded, engine._earlier = True, True, Measurements(b"key")
    passes.sizes.padded, passes.sizes.totals, passes.sizes.most_recorded = True, (32, 64), 32
    passes.token_budget.totals = (32, 64)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("given back"))

    def capture(step, pool):
        log.append("recording")
        under_way.set()
        assert go.wait(60)
        return Replayed(step, passes.rows)

    passes.capture = capture
    engine.start(lambda batch: log.extend(e.token for _, e in batch))
    try:
        assert under_way.wait(60)
        engine.submit(Request(tuple(prompt), 2, frozenset(), Draw()))
        go.set()
        until = time.monotonic() + 60
        while "given back" not in log:
            assert time.monotonic() < until
            time.sleep(0.01)
        others = ["recording"] * (len(passes.sizes.keys) - 1)
        assert log == ["recording", *alone(model, prompt, 2), *others, "given back"]
        assert list(passes.captured) == passes.sizes.keys
        assert len(passes.sizes.timed) > len(set(passes.sizes.timed) & set(passes.sizes.keys))
        assert set(passes.sizes.timed) <= set(engine.measurements.passes)
        log.clear()
        engine.submit(Request(tuple(prompt), 6, frozenset(), Draw()))
        while len(log) < 6:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert log == alone(model, prompt, 6)  # of recorded passes alone
    finally:
        engine.stop(0)


def test_a_lack_of_memory_for_a_pass_that_is_timed_later_ends_no_engine(monkeypatch):
    passes = ContinuousEngine(build("llama"), 4, running=2).passes
    passes.met, passes.untimed = set(), [(1, 64, False), (0, 128, False)]
    passes.captured = dict.fromkeys(passes.sizes.keys)
    measured = []

    def measure(*key):
        measured.append(key)
        if len(measured) == 1:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(passes, "measure", measure)
    while passes.record_next():
        pass
    assert measured == [(1, 64, False), (0, 128, False)]
    assert passes.met is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_load_of_a_running_server_on_a_gpu_answers_before_its_passes_are_recorded(draft):
    """The first one measures what the start of a server measures, while nothing is to do; a later one takes it over."""
    model = build("llama").cuda().half()
    how = {"running": 4, "cache_tokens": 4096, "draft": draft}
    given, clients = prompts(3, 130, 64, 65, 200, 17), []

    def loaded(earlier, later):
        clients.append(Client(model, earlier=earlier, later=later, **how))
        return clients[-1], clients[-1].engine

    def idle(engine):
        until = time.monotonic() + 60
        while engine._unrecorded:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert set(engine.passes.captured) == set(engine.passes.sizes.keys)
        assert not engine.passes.reason
        assert not engine.passes.untimed

    try:
        start, of_start = loaded(Measurements(b"key"), False)
        expected, at_start = start.tokens(*(start.ask(p, 24) for p in given)), of_start.measurements
        assert at_start.key == b"key"
        assert at_start.beside
        assert bool(at_start.drafts) == (draft == "ngram")
        first, of_first = loaded(Measurements(b"key"), True)
        assert len(of_first.passes.captured) < len(of_first.passes.sizes.keys)
        assert first.tokens(*(first.ask(p, 24) for p in given)) == expected
        idle(of_first)
        measured = of_first.measurements
        assert set(of_first.passes.sizes.timed) <= set(measured.passes)
        assert set(measured.drafts) == set(at_start.drafts)
        assert first.tokens(*(first.ask(p, 24) for p in given)) == expected
        for known in (at_start, measured):
            later, of_later = loaded(known, True)
            assert not of_later.passes.untimed
            assert later.tokens(*(later.ask(p, 24) for p in given)) == expected
            idle(of_later)
            assert later.tokens(*(later.ask(p, 24) for p in given)) == expected
            assert set(known.passes) <= set(of_later.measurements.passes)
            assert of_later.measurements.beside == known.beside
            assert of_later.limits == of_start.limits
    finally:
        for one in clients:
            one.engine.stop(0)
