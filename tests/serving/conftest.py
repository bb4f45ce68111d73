"""`lowq serve` as a process, on the bundled model with a chat template, on a free port."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import forking
import httpx
import pytest
from shallow import shallow

from lowq_cli.serving import processes

LOWQ = Path(sys.executable).with_name("lowq")
TEMPLATE = """{% if tools %}<tools>{{ tools | tojson }}</tools>{{ '\\n' }}{% endif %}
{% for m in messages %}
{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}assistant:{% if shout %} LOUD{% endif %}{% endif %}"""


@dataclass
class Server:
    """A process of `lowq serve`: its address, and its stderr so far."""

    process: subprocess.Popen | forking.Command
    said: list[str] = field(default_factory=list)
    url: str = ""

    def wait_ready(self, seconds=120):
        until = time.monotonic() + seconds
        while not self.url:
            assert time.monotonic() < until, "".join(self.said)
            assert self.process.poll() is None, "".join(self.said)
            time.sleep(0.02)
            result = [re.search(r"listening on (http://\S+)", line) for line in self.said]
            self.url = next((m[1] for m in result if m), "")
        return self

    def read(self):
        for line in self.process.stderr:
            self.said.append(line)

    def post(self, path, body, **how):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.url}/v1/{path}", content=raw, timeout=120, **how)

    def stats(self):
        return httpx.get(f"{self.url}/health", timeout=120).json()

    def said_last(self, text, seconds=120):
        """Wait until the last line on stderr holds `text`."""
        until = time.monotonic() + seconds
        while not (self.said and text in self.said[-1]):
            assert time.monotonic() < until, "".join(self.said)
            time.sleep(0.01)

    def idle(self, seconds=120):
        """Wait until nothing runs and nothing waits."""
        until = time.monotonic() + seconds
        while (s := self.stats())["running"] or s["waiting"]:
            assert time.monotonic() < until, s
            time.sleep(0.01)

    def stop(self, number=signal.SIGTERM, seconds=60):
        self.process.send_signal(number)
        return self.process.wait(seconds)


def begin(folder, *flags, ready=True, bounds=None, forked=True):
    """bounds: seconds of `engine_process` that this server has instead of its own; not forked, nor with them: see `apart`."""
    line = ["serve", folder, "--port", "0", "--device", "cpu", *flags]
    process = forking.Command(*line) if forked and not bounds else apart(*line, bounds=bounds)
    server = Server(process)
    threading.Thread(target=server.read, daemon=True).start()
    return server.wait_ready() if ready else server


def apart(*words, bounds=None):
    """A process of its own, whose engines' processes are its children, as users have it."""
    script = f"from lowq_cli.main import run; from lowq_cli.serving import engine_process as e; vars(e).update({bounds}); run()"
    program = [sys.executable, "-P", "-c", script] if bounds else [LOWQ]
    line = [*program, *map(str, words)]
    return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.fixture(scope="package", autouse=True)
def _forked_processes():
    """Processes of the server are forks of one that has torch: an engine takes 0.6 instead of 2 processor seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "context", forking.Contexts())
        yield


@pytest.fixture(scope="session")
def talk(tmp_path_factory):
    """A folder: the bundled model without most of its layers, and a template to chat with it."""
    folder = shallow(tmp_path_factory.mktemp("models") / "talk")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(talk):
    result = begin(talk)
    yield result
    assert not [line for line in result.said if "internal error" in line]
    result.process.kill()


@contextmanager
def starting():
    """A function that starts a server on a folder; all are ended after the block."""
    results = []

    def one(folder, *flags, **how):
        results.append(begin(folder, *flags, **how))
        return results[-1]

    try:
        yield one
    finally:
        for s in results:
            s.process.kill()
            s.process.wait()


@pytest.fixture
def start_on():
    """Start a server on a folder for one test."""
    with starting() as one:
        yield one


@pytest.fixture(scope="module")
def start_for_all():
    """Start a server on a folder for all tests of a file."""
    with starting() as one:
        yield one


@pytest.fixture
def start(talk, start_on):
    """Start another server with flags of its own."""
    return partial(start_on, talk)
