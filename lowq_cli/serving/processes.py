"""How an engine's process starts, and those that read pictures and make masks of grammars."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker, util
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import ref

# "fork" would be unsafe in a process with threads or a CUDA context
context: SpawnContext | ForkServerContext = get_context("spawn")
# handled by the server's own process only: a terminal, systemd or `timeout` sends them to all its processes
OURS = {s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")}


def started(function: Callable[..., object], args: tuple[Any, ...], name: str) -> BaseProcess:
    """A new process that calls this function, and ends with this process. The signals of OURS are blocked in it."""
    process: BaseProcess = context.Process(target=function, args=args, name=name)
    with _signals_held_back():
        process.start()
    # multiprocessing waits at the end of this process for the others: for ever, as they wait for messages from here
    util.Finalize(process, _kill, (ref(process),), exitpriority=0)
    return process


def _kill(process: "ref[BaseProcess]") -> None:
    """Kill a process, unless it has ended and been forgotten."""
    if (running := process()) is not None:
        running.kill()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Start a process in this context with the signals of OURS blocked: it is stopped through the pipe, or killed."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
    try:
        resource_tracker.ensure_running()  # multiprocessing's own process, too; its start unblocks SIGINT and SIGTERM here
        signal.pthread_sigmask(signal.SIG_BLOCK, OURS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
