"""What a server says, by a thread of its own: a log whose reader has stalled, died or filled its disk costs no answer."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from lowq_cli import console
from lowq_packers.errors import log_error

MOST = 1000  # lines that wait for a log; those after them are lost, and counted


class Printer:
    """Does what is printed, one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(MOST)
        self._lost = 0
        threading.Thread(target=self._work, name="lowq-printer", daemon=True).start()

    def say(self, line: str) -> None:
        """A line for the person."""
        self.do(lambda: console.say(line))

    def do(self, job: Callable[[], object]) -> None:
        """Something that prints; returns at once."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._lost += 1

    def close(self, seconds: float) -> bool:
        """Wait until all has been printed; False where that takes longer than it may."""
        done = threading.Event()
        with suppress(queue.Full):
            self._jobs.put(done.set, timeout=seconds)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as e:  # of one line, as one that its terminal cannot show: the next ones are printed all the same
                log_error("a line of the server's log is not printed", e)
            if self._lost and self._jobs.empty():
                lost, self._lost = self._lost, 0
                console.say(f"{lost} lines were lost while this log took none")
