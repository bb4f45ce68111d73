"""Run an engine in a separate process, which has a Python interpreter to itself.

Python runs one thread of a process at a time. With the event loop and the engine's thread in one process, an 8B on an H200
served 128 users 9,020 tokens/s over HTTP instead of the engine's 10,330, and 64 users 7,800 instead of 8,490: while answers
were written as JSON, the next pass was launched late. Therefore the main process answers HTTP, without torch, and starts
another process that loads the model and computes (engine_server.py). The pipe between them carries requests, and once a step
all their tokens.

If the engine's process dies, every open request ends with an error that says so. It ends itself when the main process is gone.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lowq_cli.serving import processes
from lowq_cli.serving.engine_server import BEAT_S, Made, compute
from lowq_cli.serving.large_messages import Part, parts, write
from lowq_cli.serving.measurements import Measurements
from lowq_cli.serving.request import Busy, Done, Event, Limits, Request, Sink, Stats, check
from lowq_packers.errors import LowqError, UnsupportedError

SILENT_S = 10.0  # seconds without a message after which clients learn that the process is stopped or starved
LOST_S = 60.0  # seconds in a silent or stuck state after which open requests end with an error
HUNG_S = 180  # seconds without a sign of life after which a load fails; imports and CUDA's start take seconds
ENDS_S = 10.0  # seconds that the process has to end by itself
KEEPS_S = 30.0  # seconds that the process has to end if it first copies its cache to host memory


class ProcessEnded(LowqError):
    """The engine's process ended without reporting an error."""


class DiedIdle(ProcessEnded):
    """The engine's process ended before it read what to make."""


class Standby:
    """A process that waits for its `make` function. It has run `first(*given)`, such as imports: torch alone takes seconds."""

    def __init__(self, first: Callable[..., object] | None = None, *given: Any) -> None:
        self.pipe, theirs = processes.context.Pipe()
        self.process = processes.started(compute, (theirs, first, given), "lowq-engine")
        theirs.close()

    def stop(self) -> None:
        """End a standby process that was not used."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class ApartEngine:
    """An Engine that `make(*given)` creates in another process.

    Args:
        make: a module-level function, given: its arguments; both are pickled, and so is its `Made.facts`.
        standby: the process to use, None for a new one. starts: the engine starts as soon as it is made, without waiting for
            `start`, which must follow.
    Attributes in addition to Engine's:
        kept: the result of the engine's `keep`, if `stop` had to ask for it.
        process: the engine's.
        facts: the `Made.facts` of `make`. Like limits, vocabulary, name and reason, it is set once `made` has returned.
    """

    name: str
    reason: str
    limits: Limits
    vocabulary: int
    facts: Any

    def __init__(self, make: Callable[..., Made], *given: Any, standby: Standby | None = None, starts: bool = False) -> None:
        standby = standby or Standby()
        self._pipe, self.process = standby.pipe, standby.process
        self._outbox: queue.SimpleQueue[list[Part]] = queue.SimpleQueue()
        self._starts = starts
        try:
            self._tell(make, given)
            if starts:
                self._tell("start")
            self._sender = threading.Thread(target=self._send, name="lowq-engine-requests", daemon=True)
            self._sender.start()
        except BaseException:  # such as too many threads
            standby.stop()
            raise
        self._changed, self._reading = threading.Condition(), threading.Lock()
        self._heard = self._moved = time.monotonic()  # time of its last message, and of its last step or idle state
        self._open: set[int] = set()
        self.kept: Any = None
        self.measurements: Measurements | None = None
        self._stats, self._number, self.closed = Stats(), 0, "the server has not started yet"
        self._listener: threading.Thread | None = None

    def made(self, hung_s: float = HUNG_S) -> Any:
        """Wait for `make` and return its `Made.facts`. Raises what `make` raised, or DiedIdle if it was never called.

        hung_s: seconds without a sign of life after which it fails.
        """
        try:
            self._wait("began", hung_s=hung_s)
        except ProcessEnded as e:
            raise DiedIdle(str(e)) from None
        self.facts, self.name, self.reason, self.limits, self.vocabulary = self._wait("made", hung_s=hung_s)
        return self.facts

    def start(self, sink: Sink, done: Done = lambda n, of: None) -> None:
        """Start the engine in its process. Raises the errors of its `start`."""
        if not self._starts:
            self._tell("start")
        self.reason, self.measurements = self._wait("started", done)
        self._sink, self.closed = sink, ""
        self._heard = self._moved = time.monotonic()
        self._listener = threading.Thread(target=self._listen, name="lowq-engine-events", daemon=True)
        self._listener.start()

    def submit(self, request: Request) -> int:
        """Queue a request and return its number."""
        check(request, self.limits.longest, self.vocabulary, request.adapter)  # the engine checks the number of the adapter
        with self._changed:
            if self.closed:
                raise UnsupportedError(self.closed)
            if stalled := self._stalled():
                raise LowqError(f"{stalled}; try again later")
            if len(self._open) - self._stats.running >= self.limits.waiting:
                raise Busy(f"{self.limits.waiting} requests wait already; try again later")
            self._number += 1
            number = self._number
            self._open.add(number)
        recipe = None if request.mask is None else request.mask.recipe
        self._tell("submit", number, replace(request, mask=None), recipe)
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request before its next token."""
        if number in self._open:
            self._tell("cancel", number)

    def keep(self) -> Any:
        """Return the result of Engine.keep, after `stop` has asked for it."""
        return self.kept

    def stats(self) -> Stats:
        """Return the engine's counts as of its last step, or `engine_server.FRESH_S` ago; waiting requests are counted here."""
        waiting = max(0, len(self._open) - self._stats.running)
        return replace(self._stats, waiting=waiting, stalled=self._stalled())

    def _stalled(self, seconds: float = 0.0) -> str:
        """Return why the process sends no tokens, once that has lasted at least `seconds` and the limits above; else ""."""
        if self._listener is None or self.closed:
            return ""
        now = time.monotonic()
        silent, stuck = now - self._heard, now - self._moved
        if silent > max(SILENT_S, seconds):
            return f"the engine's process has not answered for {silent:.0f} s"
        return f"the engine has computed nothing for {stuck:.0f} s" if stuck > max(self.limits.stuck_s, seconds) else ""

    def stop(self, seconds: float, keep: bool = False) -> None:
        """Wait up to `seconds` for open requests to finish, cancel the rest, and end the process."""
        until = time.monotonic() + seconds
        with self._changed:
            self.closed = self.closed or "the server is stopping"
            while self._open and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        if self._listener is None:  # it may still be loading
            self.process.kill()
        else:
            stalled = self._stalled()
            self._tell("stop", keep)
            self.process.join(0 if stalled else KEEPS_S if keep else ENDS_S)
            self.process.kill()
            self._listener.join(ENDS_S)
        self.process.join()
        self._outbox.put([])
        self._sender.join()  # a thread that still writes would otherwise write to whatever gets the descriptor next
        with self._reading:  # likewise `_wait`, which the end of the process wakes
            self._pipe.close()

    def _tell(self, *message: Any) -> None:
        """Queue a message to send: a process that does not read must not block the event loop."""
        self._outbox.put(parts(message))

    def _send(self) -> None:
        """Send queued messages until the end: the main function of the sending thread."""
        with suppress(OSError):  # the process has ended: the listening thread reports it
            while message := self._outbox.get():
                write(self._pipe, message)

    def _wait(self, kind: str, done: Done = lambda n, of: None, hung_s: float = HUNG_S) -> tuple[Any, ...]:
        """Wait for the process's answer and return it; `done` is called with the progress on the way."""
        silent = 0  # seconds counted here: a machine that was halted for minutes has not counted them
        while True:
            try:
                with self._reading:
                    message = self._pipe.recv() if self._pipe.poll(BEAT_S) else None
                if message is None:
                    silent += 1
                    if silent >= hung_s / BEAT_S:
                        raise LowqError(f"the engine's process has not answered for {hung_s} s")
                    continue
                silent, (what, *rest) = 0, message
            except (EOFError, OSError):
                raise ProcessEnded(self._why_it_ended()) from None
            if what == "failed":
                raise rest[0]
            if what == kind:
                return tuple(rest)
            if what != "beat":
                done(*rest)

    def _listen(self) -> None:
        """Receive events until the process has ended: the main function of the listening thread."""
        try:
            while True:
                if self._pipe.poll(BEAT_S):
                    batch, stats, closed = self._pipe.recv()
                    if batch is None:
                        self.kept, self.measurements = stats, closed
                        continue
                    self._heard = time.monotonic()
                    if stats.steps != self._stats.steps or not stats.running:
                        self._moved = self._heard
                    self._stats, self.closed = stats, self.closed or closed
                    self._deliver([(n, Event(e) if type(e) is int else e) for n, e in batch])
                if self._open and (why := self._stalled(LOST_S)):
                    self._end_all(why)
        except (EOFError, OSError):
            with self._changed:
                self.closed = self.closed or self._why_it_ended()
            self._stats = replace(self._stats, running=0)
            self._end_all(self.closed)

    def _end_all(self, why: str) -> None:
        """End all open requests with an error; later events of the process for them are dropped."""
        self._deliver([(n, Event(finish_reason="error", message=why)) for n in sorted(self._open)])

    def _deliver(self, events: list[tuple[int, Event]]) -> None:
        ended = [n for n, e in events if e.finish_reason]
        if ended:
            with self._changed:
                self._open.difference_update(ended)
                self._changed.notify_all()
        if events:
            self._sink(events)

    def _why_it_ended(self) -> str:
        self.process.join(ENDS_S)
        code = self.process.exitcode
        killed = code is not None and code < 0
        how = f"was killed by signal {-code}" if killed and code is not None else f"ended with exit code {code}"
        memory = "; the system kills what takes more memory than there is" if code == -9 else ""  # SIGKILL
        return f"the engine's process {how}{memory}"
