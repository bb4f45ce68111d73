"""Processes that are forks of one which has torch and transformers imported: that is most of what a short command takes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["forked_imports"])
_starts = threading.Lock()  # of changes to the environment
SECONDS = 300  # after which a process that should have ended has hung


def begin(function: Callable[..., Any], *args: Any, env: Mapping[str, str] = os.environ) -> multiprocessing.Process:
    """A process that calls a function of this module with these arguments; nothing of lowq is imported in it yet."""
    process = FORKS.Process(target=_child, args=(function, dict(env), args))
    with _first_imports():
        process.start()
    return process


@contextmanager
def _first_imports() -> Iterator[None]:
    """The environment of the process that is forked, which the first start in this context starts."""
    with _starts, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))))
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch would import lowq
        yield


class Forked(ForkServerProcess):
    """A fork that has the environment and the blocked signals of the process which starts it, as a spawned one has."""

    def start(self) -> None:
        self.env, self.blocked = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with _first_imports():
            super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.env)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        super().run()


class Contexts(ForkServerContext):
    """What multiprocessing calls a context: its processes are forks of the one that has torch imported."""

    Process = Forked


class Command:
    """As subprocess.Popen of `lowq serve` with these words: a fork, as are the processes that it starts (not its children)."""

    def __init__(self, *words: Any) -> None:
        stderr, theirs = FORKS.Pipe(duplex=False)
        self.stderr = open(os.dup(stderr.fileno()))  # noqa: SIM115
        self.process = begin(_server, theirs, list(map(str, words)))
        self.pid = self.process.pid
        theirs.close()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("lowq", seconds or 0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def _server(stderr: Connection, words: Sequence[str]) -> None:
    os.dup2(stderr.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w", buffering=1)  # unlike those before, a pipe has no position  # noqa: SIM115
    from lowq_cli.serving import processes

    # a fork would start a process to fork of its own, as if its parent's were not there
    vars(forkserver.connect_to_new_process.__self__).update(ensure_running=lambda: None)
    processes.context = Contexts()
    _console_script(*words)


def _child(function: Callable[..., Any], env: Mapping[str, str], args: Sequence[Any]) -> None:
    os.environ.clear()
    os.environ.update(env)
    if "PYTHONPATH" in env:
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    function(*args)


def run(
    function: Callable[..., Any], *args: Any, env: Mapping[str, str] = os.environ, cwd: Path | None = None, given: str = ""
) -> subprocess.CompletedProcess:
    """As subprocess.run: exit code, stdout and stderr of such a process, which reads `given`."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        for file, text in zip(files, (given, "", ""), strict=True):
            file.write_text(text)
        process = begin(_redirected, files, cwd or Path.cwd(), function, args, env=env)
        process.join(SECONDS)
        assert process.exitcode is not None, "it has not ended"
        return subprocess.CompletedProcess(args, process.exitcode, *(file.read_text() for file in files[1:]))


def _redirected(files: Sequence[Path], cwd: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    os.chdir(cwd)
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR), number)
    sys.stdin = open(0)  # multiprocessing has put /dev/null there  # noqa: SIM115
    function(*args)


def lowq(*words: Any, **how: Any) -> subprocess.CompletedProcess:
    """The console script with these words; how: as `run` takes it."""
    return run(_console_script, *map(str, words), **how)


def _console_script(*words: str) -> None:
    from lowq_cli import start

    sys.argv = ["lowq", *words]
    start.run()


def fork(work: Callable[[], object]) -> int:
    """A fork of this very process that calls `work`; its process id. Exit code 1 and the error on stderr if `work` fails."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as e:
        os.write(2, repr(e).encode())
    finally:  # the child must not run the tests after this one
        os._exit(code)


def script(code: str, *words: Any, **how: Any) -> subprocess.CompletedProcess:
    """As `python -c code words`; how: as `run` takes it."""
    return run(_script, code, *map(str, words), **how)


def _script(code: str, *words: str) -> None:
    sys.argv = ["-c", *words]
    exec(code, {"__name__": "__main__"})


def export_until(checkpoint: Path, to: str, out: Path, file_bytes: int, calls: int) -> None:
    """Export, and be killed at the call of `progress` with this number."""
    from lowq_cli.interop.exporter import export

    count = iter(range(1, calls + 1))

    def progress(percent: int, name: str) -> None:
        if next(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    export(checkpoint, to, out, progress=progress, file_bytes=file_bytes)


def ask_for_library(umask: int = 0o022) -> None:
    """Print whether there is a library of CPU kernels, its instruction set, why it had to be built, why there is none."""
    os.umask(umask)
    from lowq_kernels.products.cpu import native

    before = native.why_built()
    print(native.library() is not None, native.isa()[1], before or "-", native.why_not(), sep="|", flush=True)
