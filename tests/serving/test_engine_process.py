"""An engine in a process of its own answers like one in this process, and its end ends nothing else."""

import os
import queue
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import counting
import pytest
from answering import RUNNING, WAITING, Multiples, make
from asking import Client, prompts
from engine_processes import below, engines_of

from lowq_cli.engine.open_model import ready
from lowq_cli.serving.engine_process import ApartEngine
from lowq_cli.serving.request import Busy, Draw, Request
from lowq_packers.errors import DoesNotFitError, LowqError, UnsupportedError, UsageError


class Apart(Client):
    """The client of an engine in a process."""

    def __init__(self, make, *given):
        self.engine = ApartEngine(make, *given)
        self.pid = self.engine.made()["pid"]
        self.events, self.heard = queue.Queue(), {}
        self.engine.start(lambda batch: [self.events.put(e) for e in batch])


@pytest.fixture(scope="module")
def apart():
    made = Apart(make)
    yield made
    made.engine.stop(0)


@pytest.fixture(scope="module")
def beside():
    made = Client(ready("demo", "cpu")[0], running=RUNNING)
    yield made
    made.engine.stop(0)


def gone(pid):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_answers_equal_those_of_an_engine_in_this_process(apart, beside):
    assert apart.pid != os.getpid()
    ways = [{}, {"logprobs": 3}, {"temperature": 0.7, "seed": 4, "top_k": 30}, {"frequency_penalty": 0.5, "stop": (17,)}]
    for prompt, way in zip(prompts(20, 33, 9, 41), ways, strict=True):
        here, there = (c.follow(c.ask(prompt, 12, **way))[0] for c in (beside, apart))
        assert there == here
        assert len(here) == 12 or here[-1].finish_reason == "stop"
    here, there = ((e.stats().new_tokens, e.name, e.vocabulary, e.limits.longest) for e in (beside.engine, apart.engine))
    assert there == here


def test_a_mask_is_made_again_there(apart):
    prompt = tuple(prompts(15)[0])
    events = apart.follow(apart.engine.submit(Request(prompt, 20, draw=Draw(), mask=Multiples("7"))))[0]
    assert [e.token % 7 for e in events[:-1]] == [0] * 5
    assert (events[-1].finish_reason, events[-1].message) == ("refused", "no rule fits")
    bad = apart.follow(apart.engine.submit(Request(prompt, 20, draw=Draw(), mask=Multiples("seven"))))[0]
    assert (bad[-1].finish_reason, len(bad)) == ("error", 1)


def test_impossible_requests_and_those_without_room_are_refused(apart):
    with pytest.raises(UsageError, match="are more than the 1024 that fit"):
        apart.ask([5] * 1000, 50)
    numbers = [apart.ask([5, 6], 500) for _ in range(WAITING)]
    while apart.engine.stats().running < RUNNING:
        time.sleep(0.001)
    numbers += [apart.ask([5, 6], 500) for _ in range(RUNNING)]
    with pytest.raises(Busy, match="4 requests wait already"):
        apart.ask([5, 6], 5)
    for n in numbers:
        apart.engine.cancel(n)
    apart.engine.cancel(10**6)
    ends = [events[-1].finish_reason for events in apart.follow(*numbers)]
    assert set(ends) <= {"cancelled", "length"}
    assert "cancelled" in ends
    until = time.monotonic() + 60
    while (s := apart.engine.stats()).running or s.waiting:
        assert time.monotonic() < until, s
    assert len(apart.tokens(apart.ask([5, 6], 5))[0]) == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_ends_only_open_requests(number):
    client = Apart(counting.make)
    try:
        numbers = [client.ask(p, 400) for p in prompts(10, 12, 14, 16)]
        client.hear()
        os.kill(client.pid, signal.SIGTERM)  # which comes to both, and is the other one's to obey
        client.hear()
        os.kill(client.pid, number)
        for events in client.follow(*numbers):
            assert (events[-1].finish_reason, events[-1].token) == ("error", None)
            assert f"the engine's process was killed by signal {number:d}" in events[-1].message
            assert ("memory" in events[-1].message) == (number == signal.SIGKILL)
        with pytest.raises(UnsupportedError, match=f"was killed by signal {number:d}"):
            client.ask([5], 3)
        assert client.engine.closed
        assert client.engine.stats().running == client.engine.stats().waiting == 0
    finally:
        client.engine.stop(5)
    assert gone(client.pid)


def test_the_process_ends_with_its_engine_and_answers_before():
    client = Apart(counting.make)
    number = client.ask([5, 6, 7], 40)
    client.engine.stop(30)
    assert len(client.tokens(number)[0]) == 40
    assert gone(client.pid)
    with pytest.raises(UnsupportedError, match="the server is stopping"):
        client.ask([5], 3)


@pytest.mark.half_of("fault", "starts")
@pytest.mark.parametrize(
    ("fault", "kind", "line"),
    [
        ("memory", DoesNotFitError, "a cache of 3 GB does not fit"),
        ("strange", LowqError, "Strange: only here known"),
        ("gone", LowqError, "the engine's process ended with exit code 3"),
        ("start", MemoryError, "while recording passes"),
    ],
)
@pytest.mark.parametrize("starts", [False, True])
def test_an_engine_that_cannot_be_made_or_started_says_why(fault, kind, line, starts):
    engine, output = ApartEngine(counting.make, fault, starts=starts), []

    def begin():
        engine.made()
        if starts:  # its start fails before it is asked for
            engine.process.join(60)
            assert not engine.process.is_alive()
        engine.start(lambda batch: None, lambda n, of: output.append((n, of)))

    try:
        with pytest.raises(kind, match=line):
            begin()
        assert output == ([(1, 2)] if fault == "start" else [])
    finally:
        engine.stop(0)


LEFT = """import counting, time
from lowq_cli.serving.engine_process import ApartEngine
if __name__ == "__main__":
    print(ApartEngine(counting.make).made()["pid"], flush=True)
    time.sleep(60)
"""


def test_an_engine_process_ends_with_its_parent():
    line = [sys.executable, "-c", LEFT]
    with subprocess.Popen(line, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as other:
        pid = int(other.stdout.readline())
        os.kill(pid, 0)
        other.kill()
        assert gone(pid)


def test_a_server_answers_what_a_terminal_interrupts_and_ends_with_its_engine(start):
    """Ctrl-C, a closed terminal, `timeout` and `systemctl kill` send their signal to every process of the server's group."""
    s = start(forked=False)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1]}}}
    assert s.post("completions", {"prompt": "Once", "max_tokens": 3, "response_format": form}).status_code == 200
    group = [p for p in below(s.process.pid) if os.getpgid(p) == os.getpgid(s.process.pid)]
    assert len(group) >= 3  # the engine, multiprocessing's tracker, the process of masks
    for pid, number in product(group, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        os.kill(pid, number)
    time.sleep(0.3)
    assert s.post("completions", {"prompt": "Once", "max_tokens": 3}).status_code == 200
    assert group == [p for p in below(s.process.pid) if os.getpgid(p) == os.getpgid(s.process.pid)]
    (engine,) = engines_of(s.process.pid)
    os.kill(engine, signal.SIGKILL)
    assert s.process.wait(60) == 2
    s.said_last("lowq: the engine's process was killed by signal 9; the system kills what takes more memory than there is")
