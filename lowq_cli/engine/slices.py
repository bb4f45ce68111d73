"""Work of the host in slices: a thread that runs while the caller would wait for the device, and hands control back in time.

Two threads that both run Python wait up to 5 ms for the interpreter's lock each time one of them returns from a call that
released it, which is as long as several steps of a model. Here one of the two always waits for the other instead.
"""

import time
from collections.abc import Callable
from threading import Condition, Thread, main_thread

# Seconds that the work waits to be lent time before it goes on without: it may hold locks that others need.
PATIENCE_S = 0.05
# Seconds past the end of a slice after which the caller goes on: a call may take long that was expected to be short.
LATE_S = 0.0001


class Stopped(Exception):
    """The work was asked to end."""


class Work(Thread):
    """A thread that a command does not wait for at its end (`main._end`). Where Python itself ends, it is joined as others are:
    a compiler must not run on while the interpreter is taken down."""

    cut_off = True


class Sliced:
    """A call `work(self)` in a thread, which runs inside `lend`, calls `pause` often and `commit` once.

    Attributes:
        ended: whether the work is over. error: the exception that ended it, or None.
    """

    def __init__(self, work: Callable[["Sliced"], object]) -> None:
        self.ended = False
        self.error: Exception | None = None
        self._turn, self._until = Condition(), 0.0
        self._lent = self._alone = False  # whether the work may run; whether it runs without being lent time
        self._stopped = self._committed = False
        self._thread = Work(target=self._run, args=(work,))
        self._thread.start()

    def lend(self, until: float) -> None:
        """Let the work run until `until`, in seconds of `time.perf_counter`, or to its end.

        If it does not hand back control in time, as in a compiler, both run, and this returns at once until the work pauses.
        """
        with self._turn:
            if self._lent or self._alone or time.perf_counter() >= until:
                return
            self._until, self._lent = until, True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._lent, until + LATE_S - time.perf_counter())

    def pause(self) -> None:
        """Called by the work: wait for the next slice if this one is over. Raises Stopped as `commit`."""
        if not self._committed and (self._stopped or not main_thread().is_alive()):
            raise Stopped
        if self._alone or time.perf_counter() < self._until:
            return
        with self._turn:
            self._wait()

    def commit(self) -> None:
        """Called by the work: from now on it goes on to its end. Raises Stopped if it was stopped, or the process ends."""
        with self._turn:
            if self._stopped or not main_thread().is_alive():
                raise Stopped
            self._committed = True

    def stop(self) -> bool:
        """Let the work end at its next `pause`, without waiting for it; False if it has committed itself."""
        with self._turn:
            self._stopped = not self._committed
        self.go_on()
        return self._stopped

    def go_on(self) -> None:
        """Let the rest of the work run without slices: it waits in foreign calls, or the caller has nothing else to do."""
        with self._turn:
            self._lent, self._alone = False, True
            self._turn.notify_all()

    def finish(self) -> None:
        """Wait for the end of the work."""
        self.go_on()
        self._thread.join()

    def _wait(self) -> None:
        self._lent = False
        self._turn.notify_all()
        if not self._turn.wait_for(self._may_run, PATIENCE_S):
            self._alone = True

    def _may_run(self) -> bool:
        return self._lent or self._alone

    def _run(self, work: Callable[["Sliced"], object]) -> None:
        try:
            with self._turn:
                self._turn.wait_for(self._may_run, PATIENCE_S)
            work(self)
        except Exception as e:  # the caller reads it
            self.error = e
        finally:
            self.go_on()
            self.ended = True
