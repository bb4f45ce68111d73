"""Engine processes killed in each phase of a model, alone and two at once: no request is forgotten, the next is answered."""

import asyncio
import os
import signal
import threading
import time
from contextlib import asynccontextmanager
from multiprocessing import active_children
from unittest.mock import Mock

import phases
import pytest
from phases import Gate
from starlette.requests import ClientDisconnect

from lowq_cli.serving import engine_process
from lowq_cli.serving.engine_process import ApartEngine
from lowq_cli.serving.host_memory import HostMemory, Kept
from lowq_cli.serving.http import refusal
from lowq_cli.serving.http.loading import Loader
from lowq_cli.serving.http.model_pool import ModelPool
from lowq_cli.serving.http.place import PROCESS, State
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.request import Request
from lowq_packers.errors import LowqError

# The engines' processes count instead of loading a model; a process that stands by imports nothing.
LIGHT = {"make": phases.load, "first": phases.get_ready}


class Server:
    """A pool of the models a and b with real processes, and room for `room` of them."""

    def __init__(self, folder, room):
        self.gates = {name: Gate(folder / name) for name in "ab"}
        self.host = HostMemory(1 << 20, 2)
        self.loader = Loader("cpu", {}, self.host, **LIGHT)
        offers = {name: gate.offer() for name, gate in self.gates.items()}
        self.pool = ModelPool(offers, "a", self.loader.begin, room * PROCESS + 1)
        self.pool.reports.host, self.pool.loads.prepare = self.host, self.loader.prepare

    async def ask(self, name, receive=None):
        """How a request ends: "answered", with a status and the time to come back, "left", or "broken off" in its answer."""
        try:
            async with self.pool.lease(name, receive) as model:
                live = model.hub.submit([Request((1, 2), 3)])
            events = []
            while not (events and events[-1].finish_reason):
                events += (await live.take()).get(0, [])
        except Refusal as e:
            return f"{e.status}, again after {e.headers.get('Retry-After')} s"
        except ClientDisconnect:
            return "left"
        return "answered" if events[-1].finish_reason == "length" else "broken off"

    async def standby(self):
        """The process that waits for the next model."""
        await until(lambda: self.loader.standby)
        return self.loader.standby.process

    async def again(self, name):
        """A request after the pause that a refusal names."""
        self.pool.places[name].again = 0.0
        return await self.ask(name)

    def check(self):
        """Nothing waits, nothing is counted that has ended, and models are still loaded."""
        assert not self.pool.loads.ended
        for place in self.pool.places.values():
            assert (len(place.waiters), place.beginning, place.busy) == (0, 0, False)
            assert place.state in (State.READY, State.ABSENT, State.FAILED)


async def until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _leaves_no_process():
    """A test ends with the child processes that it began with, such as a server that other files share."""
    before = set(active_children())
    yield
    assert set(active_children()) <= before


@asynccontextmanager
async def serving(folder, room):
    s = Server(folder, room)
    await s.pool.start(lambda n, of: None)
    try:
        yield s
        s.check()
        assert await s.again("a") == "answered"
        s.check()
    finally:
        s.pool.close()
        await asyncio.to_thread(s.pool.stop)
        s.pool.loads.task.cancel()
        await asyncio.to_thread(s.loader.stop)
        s.host.close()


def run(what):
    asyncio.run(asyncio.wait_for(what, 120))


async def brought(s, name, phase):
    """Bring a model to a phase: its process, and a function that waits for the ends of its requests after that was killed."""
    if phase in ("ready", "answering"):
        assert await s.ask(name) == "answered"
    if phase == "ready":
        engine = s.pool.places[name].model.engine

        async def after():
            await until(lambda: engine.closed)
            return [await s.ask(name)]

        return engine.process.pid, after
    if phase == "standby":
        pid = (await s.standby()).pid
        os.kill(pid, signal.SIGSTOP)  # it has not read what to load when it is killed
    else:
        s.gates[name].stand(phase)
    asking = [asyncio.create_task(s.ask(name)) for _ in range(2)]
    await until(lambda: s.pool.places[name].loading if phase == "standby" else s.gates[name].standing)
    return pid if phase == "standby" else s.gates[name].standing, lambda: asyncio.gather(*asking)


async def killed_in(s, **phases):
    """Bring models to phases, one after another, kill their processes at once, and return how their requests ended."""
    each = [await brought(s, name, phase) for name, phase in phases.items()]
    for pid, _ in each:
        os.kill(pid, signal.SIGKILL)
    return [await after() for _, after in each]


ENDS = {
    "standby": ["answered"] * 2,  # by another process
    "making": ["503, again after 1 s"] * 2,
    "starting": ["503, again after 1 s"] * 2,
    "ready": ["answered"],
    "answering": ["broken off"] * 2,
}


@pytest.mark.parametrize("phase", ENDS)
def test_a_process_killed_in_a_phase_ends_its_requests(phase, tmp_path):
    async def go():
        async with serving(tmp_path, 1) as s:
            assert await killed_in(s, a=phase) == [ENDS[phase]]

    run(go())


@pytest.mark.parametrize("phase", ["stopping", "keeping"])
def test_a_process_killed_while_it_is_unloaded_delays_no_other(phase, tmp_path):
    async def go():
        async with serving(tmp_path, 1) as s:
            assert await s.ask("a") == "answered"
            s.gates["a"].stand(phase)
            asking = [asyncio.create_task(s.ask(name)) for name in "bba"]
            await until(lambda: s.gates["a"].standing)
            os.kill(s.gates["a"].standing, signal.SIGKILL)
            assert await asyncio.gather(*asking) == ["answered"] * 3

    run(go())


@pytest.mark.parametrize(("first", "second"), [("ready", "standby"), ("answering", "starting")])
def test_two_processes_killed_at_once(first, second, tmp_path):
    async def go():
        async with serving(tmp_path, 2) as s:
            assert await killed_in(s, a=first, b=second) == [ENDS[first], ENDS[second]]
            assert await s.again("b") == "answered"

    run(go())


def test_a_process_killed_before_a_leased_request_is_queued(tmp_path):
    async def go():
        async with serving(tmp_path, 1) as s:
            assert await s.ask("a") == "answered"
            async with s.pool.lease("a") as model:
                os.kill(model.engine.process.pid, signal.SIGKILL)
                await until(lambda: model.engine.closed)
                with pytest.raises(LowqError, match="was killed by signal 9") as died:
                    model.hub.submit([Request((1, 2), 3)])
            why = refusal.of(died.value)
            assert (why.status, why.headers) == (503, {"Retry-After": "5"})

    run(go())


def test_a_process_that_hangs_while_it_loads_is_given_up(tmp_path):
    """It is stopped while it stands still in its load, where it gives signs of life, so none comes any more."""
    gate = Gate(tmp_path / "a")
    gate.offer()
    gate.stand("making")
    engine = ApartEngine(phases.load, str(gate.folder), "cpu", {}, True)
    try:
        run(until(lambda: gate.standing))
        os.kill(engine.process.pid, signal.SIGSTOP)
        with pytest.raises(LowqError, match="has not answered for 1 s"):
            engine.made(hung_s=1)
    finally:
        engine.stop(0)


def test_the_pipe_stays_open_while_a_thread_writes_to_it(tmp_path, monkeypatch):
    """The descriptor would go to the next model's pipe, and the message with it."""
    writes, may_write = threading.Event(), threading.Event()

    def late(pipe, message):
        writes.set()
        may_write.wait()

    monkeypatch.setattr(engine_process, "write", late)
    engine = ApartEngine(phases.load, str(tmp_path), "cpu", {}, True)
    assert writes.wait(60)
    ending = threading.Thread(target=engine.stop, args=(0,))
    ending.start()
    engine.process.join()
    ending.join(0.2)
    assert ending.is_alive()
    may_write.set()
    ending.join(60)
    assert not ending.is_alive()


def test_a_server_that_ends_as_a_load_begins_leaves_no_process(tmp_path):
    async def go():
        s = Server(tmp_path, 1)
        await s.pool.start(lambda n, of: None)
        asking = asyncio.create_task(s.ask("a"))
        await until(lambda: s.pool.places["a"].state is State.LOADING)
        s.pool.loads.task.cancel()  # what an event loop does to its tasks at its end
        s.pool.close()
        assert await asking == "503, again after 5 s"
        return s

    s = asyncio.run(go())
    s.pool.stop()
    s.loader.stop()
    s.host.close()


class Slow(str):
    """A device's name that a process is not given before the test lets it."""

    __slots__ = ("asked", "given")

    def __reduce__(self):
        self.asked.set()
        assert self.given.wait(60)
        return str, ("cpu",)


@pytest.mark.parametrize("what", ["begin", "prepare"])
def test_a_process_that_starts_while_the_loader_stops_is_ended_too(what, tmp_path):
    device = Slow("cpu")
    device.asked, device.given = threading.Event(), threading.Event()
    loader, offer = Loader(device, {}, **LIGHT), Gate(tmp_path / "a").offer()
    starting = threading.Thread(target={"begin": lambda: loader.begin(offer), "prepare": loader.prepare}[what])
    stopping = threading.Thread(target=loader.stop)
    starting.start()
    assert device.asked.wait(60)
    stopping.start()
    stopping.join(0.1)  # without a lock it would end here
    device.given.set()
    starting.join(60)
    stopping.join(60)
    loader.prepare()  # a thread of the server that comes late
    with pytest.raises(LowqError, match="the server is stopping"):
        loader.begin(offer)


def test_a_client_that_leaves_before_the_process_is_killed(tmp_path):
    async def go():
        async with serving(tmp_path, 1) as s:
            s.gates["a"].stand("making")
            gone = asyncio.Event()

            async def receive():
                await gone.wait()
                return {"type": "http.disconnect"}

            asking = asyncio.create_task(s.ask("a", receive))
            await until(lambda: s.gates["a"].standing)
            gone.set()
            assert await asking == "left"
            other = asyncio.create_task(s.ask("b"))
            os.kill(s.gates["a"].standing, signal.SIGKILL)
            assert await other == "answered"

    run(go())


@pytest.mark.parametrize("ahead", [False, True], ids=["new process", "standby process"])
@pytest.mark.parametrize("fault", ["options", "threads", "processes"])
def test_a_load_that_cannot_begin_gives_everything_back(tmp_path, monkeypatch, fault, ahead):
    host = HostMemory(1 << 20, 1)
    host.take_back("a", lent := host.lend("a"), kept := Kept(b"", [1], None, 7))
    loader = Loader("cpu", {"draft": threading.Lock()} if fault == "options" else {}, host, **LIGHT)
    if ahead:
        loader.prepare()
    with monkeypatch.context() as broken:
        if fault == "threads":
            broken.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        if fault == "processes":  # with a standby process, none has to be started
            broken.setattr(engine_process.Standby, "__init__", Mock(side_effect=BlockingIOError(11, "too many processes")))
        if fault == "processes" and ahead:
            loader.begin(Gate(tmp_path / "a").offer()).stop()
            host.take_back("a", host.lend("a"), kept)
        else:
            with pytest.raises((TypeError, RuntimeError, BlockingIOError)):
                loader.begin(Gate(tmp_path / "a").offer())
    again = host.lend("a")
    assert (again.path, again.kept) == (lent.path, kept)
    host.close()


@pytest.mark.parametrize("status", [503, 429])
def test_every_refusal_for_now_says_when_to_come_again(status):
    assert int(Refusal(status, "the server is stopping", "server_error").headers["Retry-After"]) > 0
    assert Refusal(status, "line", retry=9).headers == {"Retry-After": "9"}
