"""How the server's process starts others: an engine's, and those that read pictures."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext

# "fork" would be unsafe in a process with threads or a CUDA context
context: SpawnContext | ForkServerContext = get_context("spawn")
# handled by the server's own process only: a terminal, systemd or `timeout` sends them to all its processes
OURS = {s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")}


@contextmanager
def signals_held_back() -> Iterator[None]:
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
