"""While a CUDA graph is recorded, none is freed and no thread waits for the device: shown with a stand-in that notes both."""

import gc
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from lowq_kernels import counters
from lowq_kernels.graphs import Graph, empty_cache, retried, wait
from lowq_packers.errors import DoesNotFitError

ROOT = Path(__file__).parents[2]
POOL = (0, 1)
TIMES = 50
SOON_S = 0.001  # what another thread begins now, it begins within this time


class Device:
    """The state of one device: recordings under way now and at most, for each freed graph whether there was one, and for each
    wait how many there were at its begin and its end."""

    def __init__(self):
        self.recordings = self.most = 0
        self.freed = []
        self.waits = []

    def graph(self):
        return Graph(StandIn(self))

    def wait(self, device=None):
        begun = self.recordings
        time.sleep(SOON_S)
        self.waits.append((begun, self.recordings))


class StandIn:
    """As torch's CUDAGraph: records between `capture_begin` and `capture_end`, and is destroyed with its last reference."""

    def __init__(self, device):
        self.device = device

    def capture_begin(self, capture_error_mode, pool=POOL):
        assert pool == POOL
        self.device.recordings += 1
        self.device.most = max(self.device.most, self.device.recordings)

    def capture_end(self):
        self.device.recordings -= 1

    def replay(self):
        """Nothing was recorded."""

    def __del__(self):
        self.device.freed.append(self.device.recordings > 0)


class Loaded:
    """A model whose parts refer to each other: only the garbage collector frees its graph."""

    def __init__(self, graph):
        self.graph, self.itself = graph, self


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_left_out():
    """What exists before these tests is not searched at each collection: a session's objects take half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def allocate():
    """Enough containers that Python collects garbage by itself, where that is enabled."""
    return [[] for _ in range(4 * max(gc.get_threshold()[0], 700))]


def unload_and_collect(cache):
    cache.clear()
    gc.collect()


DROPS = {
    "a full cache": lambda cache: cache.clear(),
    "another thread": lambda cache: in_thread(cache.clear),
    "collected in another thread": lambda cache: in_thread(lambda: unload_and_collect(cache)),
    "collected by hand": unload_and_collect,
    "collected by Python": lambda cache: (cache.clear(), allocate()),
}


@pytest.mark.parametrize("fails", [False, True], ids=["", "recording fails"])
@pytest.mark.parametrize("cyclic", [False, True], ids=["", "in a cycle"])
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_a_graph_dropped_while_another_is_recorded_is_freed_afterwards(drop, cyclic, fails):
    device = Device()
    cache = [Loaded(device.graph()) if cyclic else device.graph() for _ in range(3)]
    graph, enabled = device.graph(), gc.isenabled()
    gc.enable()
    try:
        with graph.recording(None, POOL):
            drop(cache)
            assert device.freed == []
            if fails:
                raise RuntimeError("the step waits for the device")
    except RuntimeError:
        assert fails
    finally:
        assert gc.isenabled()
        gc.enable() if enabled else gc.disable()
    gc.collect()
    assert device.freed == [False] * 3
    graph.replay()
    del graph
    assert device.freed == [False] * 4


def test_an_error_that_outlives_its_recording_holds_no_graph():
    class Failing(StandIn):
        def capture_end(self):
            super().capture_end()
            raise RuntimeError("operation failed due to a previous error during capture")

    device, errors = Device(), []
    graph = Graph(Failing(device))
    try:
        with graph.recording(None, POOL):
            pass
    except RuntimeError as e:
        errors.append(e)
    assert errors
    del graph
    with device.graph().recording(None, POOL):
        errors.clear()
        assert device.freed == []
    assert device.freed == [False] * 2


def test_the_stand_in_shows_a_graph_that_is_freed_too_early():
    device = Device()
    raw = StandIn(device)
    with device.graph().recording(None, POOL):
        del raw
    assert device.freed[0] is True


def test_garbage_of_others_is_not_collected_while_a_graph_is_recorded():
    """torch.compile and libraries hold graphs that are not ours."""
    device = Device()
    gc.enable()
    cycle = Loaded(StandIn(device))
    with device.graph().recording(None, POOL):
        del cycle
        allocate()
        assert device.freed == []
    gc.collect()
    assert device.freed
    assert not any(device.freed)


def test_two_threads_record_one_after_the_other_and_a_third_may_drop_graphs_meanwhile():
    device, first_begun, dropped = Device(), threading.Event(), threading.Event()

    def first():
        with device.graph().recording(None, POOL):
            first_begun.set()
            assert dropped.wait(20)

    def second():
        assert first_begun.wait(20)
        with device.graph().recording(None, POOL):
            assert dropped.is_set()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for t in threads:
        t.start()
    assert first_begun.wait(20)
    cache = [device.graph() for _ in range(50)]
    cache.clear()  # does not wait for the recording
    dropped.set()
    for t in threads:
        t.join(20)
        assert not t.is_alive()
    assert device.most == 1
    assert device.freed == [False] * 52


def record_and_call(record, call):
    """Two threads record TIMES times each; during each recording two others begin a call."""
    begun = [threading.Semaphore(0) for _ in range(2)]

    def during():
        for one in begun:
            one.release()
        time.sleep(SOON_S)

    def record_all():
        for _ in range(TIMES):
            record(during)

    def call_all(one):
        for _ in range(2 * TIMES):
            assert one.acquire(timeout=20)
            call()

    with ThreadPoolExecutor(4) as threads:
        for future in [*(threads.submit(record_all) for _ in range(2)), *(threads.submit(call_all, one) for one in begun)]:
            future.result()


@pytest.mark.parametrize("fails", [False, True], ids=["", "recording fails"])
@pytest.mark.parametrize("pool", [None, POOL], ids=["", "pool"])
@pytest.mark.parametrize("call", [lambda: wait(torch.device("cuda")), empty_cache], ids=["wait", "empty cache"])
def test_what_waits_for_the_device_and_a_recording_exclude_each_other(call, fails, pool, monkeypatch):
    """Also both waits with which a recording without a pool begins."""
    device = Device()
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, device.wait)

    def record(during):
        with suppress(KeyError), device.graph().recording(None, pool):
            during()
            if fails:
                raise KeyError

    record_and_call(record, call)
    assert device.waits == [(0, 0)] * ((8 if pool is None else 4) * TIMES)
    assert device.most == 1
    assert device.freed == [False] * 2 * TIMES


@pytest.mark.parametrize("ends", ["after the failure", "before the failure", "before the load", "never begun"])
@pytest.mark.parametrize("small", [False, True], ids=["", "too large in any case"])
def test_a_load_that_found_no_memory_during_a_recording_begins_again_when_cached_memory_is_given_back(ends, small, monkeypatch):
    """A load beside no recording fails at once: torch has given its cached memory back by itself."""
    device, given_back, tries = Device(), [], []
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(device.recordings))

    def record():
        with device.graph().recording(None, POOL):
            begun.set()
            assert go_on.wait(20)

    @retried
    def load(name):
        tries.append(name)
        if ends == "before the failure":
            end()
        if small or not given_back:
            threading.Timer(SOON_S, go_on.set).start()
            raise DoesNotFitError(name)
        return name

    def end():
        go_on.set()
        recorder.join(20)

    recorder = threading.Thread(target=record)
    if ends != "never begun":
        recorder.start()
        assert begun.wait(20)
    if ends == "before the load":
        end()
    beside = ends in ("after the failure", "before the failure")
    if beside and not small:
        assert load("a model") == "a model"
    else:
        with pytest.raises(DoesNotFitError):
            load("a model")
    assert (tries, given_back) == (["a model"] * (2 if beside else 1), [0] if beside else [])
    if ends != "never begun":
        end()


def test_the_stand_in_shows_a_wait_during_a_recording():
    device = Device()
    with device.graph().recording(None, POOL):
        in_thread(device.wait)
    assert device.waits == [(1, 1)]


def test_a_wait_for_the_device_inside_a_recording_is_an_error_that_leaves_the_recording_as_it_is():
    device = Device()
    with device.graph().recording(None, POOL):
        with pytest.raises(RuntimeError, match="by this thread already"):
            wait(torch.device("cuda"))
        assert device.recordings == 1


def test_a_recording_inside_a_recording_is_an_error():
    device = Device()
    with device.graph().recording(None, POOL):
        with pytest.raises(RuntimeError, match="by this thread already"), device.graph().recording(None, POOL):
            pass
        assert device.recordings == 1
    with device.graph().recording(None, POOL):
        assert device.recordings == 1


def test_graphs_are_made_in_one_place():
    """Any other would be freed at any time, or free others while it is recorded."""
    sources = [p for folder in ("packers", "kernels", "lowq_cli") for p in (ROOT / folder).rglob("*.py")]
    result = {p.name for p in sources if re.search(r"CUDAGraph\b|cuda\.graph\(|capture_begin", p.read_text())}
    assert result == {"graphs.py"}


# by torch, by the driver, by torch's profiler at its end, and by Triton's timing loops
WAITS_FOR_THE_DEVICE = re.compile(
    r"(cuda|accelerator)\.(synchronize|empty_cache)|import .*\bsynchronize\b|(Device|Ctx|Context)Synchronize|"
    r"torch\.profiler import .*\bprofile\b|do_bench|autotune"
)


def test_the_device_is_waited_for_in_one_place():
    """Any other wait would fail while another thread records. `lowq generate --profile` has no such thread."""
    kinds = {".py", ".cu", ".cuh", ".cpp", ".h"}
    files = [p for folder in ("packers", "kernels", "lowq_cli") for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    assert {p.name for p in files if WAITS_FOR_THE_DEVICE.search(p.read_text())} == {"graphs.py", "profiling.py"}


def waits_for_the_device(x):
    x.sum().item()


def leaves_a_stream_of_its_own(x):
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x + 1


def needs_more_memory_than_there_is(x):
    x.new_empty(1 << 50)


def raises(x):
    raise RuntimeError("not a kernel of CUDA's")


def record(work, stream, pool):
    with Graph().recording(stream, pool):
        work()


FAILURES = [waits_for_the_device, leaves_a_stream_of_its_own, needs_more_memory_than_there_is, raises]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
on_gpu = pytest.mark.parametrize("pooled", [pytest.param(False, marks=gpu), pytest.param(True, marks=gpu)], ids=["", "pool"])


@on_gpu
@pytest.mark.parametrize("fails", FAILURES)
def test_a_failed_recording_leaves_torch_as_it_was(fails, pooled):
    stream, x, earlier = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda"), Graph()
    with earlier.recording(stream):
        x * 2
    pool = earlier.pool() if pooled else None
    torch.manual_seed(3)
    expected, current = torch.rand(4, device="cuda"), torch.cuda.current_stream()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError):
        record(lambda: fails(torch.rand(1 << 20, device="cuda") + x), stream, pool)
    assert torch.cuda.current_stream() == current
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    torch.ones(1 << 26, device="cuda").record_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved + x[0].element_size() * (1 << 26)  # they were given back
    graph = Graph()
    with graph.recording(stream, pool):
        drawn = torch.rand(4, device="cuda") * x[:4]
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(drawn, expected)


@on_gpu
def test_other_threads_use_the_gpu_while_one_records(pooled, monkeypatch):
    monkeypatch.setattr(counters, "_arenas", {})
    stream, graph, x = torch.cuda.Stream(), Graph(), torch.ones(8, device="cuda")
    results = []

    def work():
        pinned = torch.full((1 << 22,), 2.0).pin_memory()
        results.append(float(pinned.to("cuda", non_blocking=True).sum()))
        torch.cuda.current_stream().synchronize()
        torch.cuda.current_stream().record_event().synchronize()
        counters.reserve(1, x.device)  # waits for the zeros
        torch.cuda.empty_cache()

    with graph.recording(stream, torch.cuda.graph_pool_handle() if pooled else None):
        y = x + 1
        in_thread(work)
        z = y * 3
    assert results == [2.0 * (1 << 22)]
    x.fill_(4)
    graph.replay()
    assert z.tolist() == [15.0] * 8


@on_gpu
def test_cached_memory_is_given_back_although_another_thread_records(pooled):
    stream, graph, x = torch.cuda.Stream(), Graph(), torch.ones(8, device="cuda")
    torch.cuda.empty_cache()
    with ThreadPoolExecutor(1) as threads:
        with graph.recording(stream, torch.cuda.graph_pool_handle() if pooled else None):
            y = x + 1
            threads.submit(lambda: torch.empty(1 << 28, dtype=torch.uint8, device="cuda")).result()  # freed at once: cached
            cached = torch.cuda.memory_reserved()
            given_back = threads.submit(empty_cache)
            time.sleep(SOON_S)
        given_back.result()
    assert torch.cuda.memory_reserved() <= cached - (1 << 28)
    graph.replay()
    assert y.tolist() == [2.0] * 8


@on_gpu
def test_threads_wait_for_the_gpu_while_others_record(pooled):
    pool, x, made = torch.cuda.graph_pool_handle() if pooled else None, torch.ones(8, device="cuda"), []

    def record(during):
        graph = Graph()
        with graph.recording(torch.cuda.Stream(), pool):
            y = x + 1
            during()
            z = y * 3
        made.append((graph, z))

    record_and_call(record, lambda: wait(x.device))
    x.fill_(4)
    for graph, z in made:
        graph.replay()
        assert z.tolist() == [15.0] * 8
    assert len(made) == 2 * TIMES


def test_a_graph_holds_the_counters_that_its_launches_took(monkeypatch):
    """A later model reserves more of them, in another tensor."""
    monkeypatch.setattr(counters, "_arenas", {})
    cpu, graph = torch.device("cpu"), Device().graph()
    counters._arenas[cpu] = torch.zeros(4), [0]
    with graph.recording(None, POOL):
        pass
    taken = weakref.ref(counters._arenas[cpu][0])
    counters._arenas[cpu] = torch.zeros(8), [0]
    assert taken() is not None
    del graph
    assert taken() is None
