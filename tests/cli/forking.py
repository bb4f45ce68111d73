"""Processes that are forks of one which has torch and transformers imported: that is most of what a short command takes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["forked_imports"])
SECONDS = 300  # after which a process that should have ended has hung


def begin(function: Callable[..., Any], *args: Any, env: Mapping[str, str] = os.environ) -> multiprocessing.Process:
    """A process that calls a function of this module with these arguments; nothing of lowq is imported in it yet."""
    with pytest.MonkeyPatch.context() as patch:  # for the process that is forked, which the first call starts
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))))
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch would import lowq
        process = FORKS.Process(target=_child, args=(function, dict(env), args))
        process.start()
    return process


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
