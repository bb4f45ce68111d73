"""Print a server's log in a separate thread: a log whose reader has stalled, died or filled its disk delays no answer."""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from lowq_cli import console
from lowq_packers.errors import log_error

MOST = 1000  # max. lines that wait to be printed; further lines are dropped and counted


class Printer:
    """A thread that runs print jobs one after another."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(MOST)
        self._lost = 0
        threading.Thread(target=self._work, name="lowq-printer", daemon=True).start()

    def say(self, line: str) -> None:
        """Queue a line for the terminal."""
        self.do(lambda: console.say(line))

    def do(self, job: Callable[[], object]) -> None:
        """Queue a job that prints, and return at once."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._lost += 1

    def close(self, seconds: float) -> bool:
        """Wait until everything has been printed; return False if that takes longer than `seconds`."""
        done = threading.Event()
        with suppress(queue.Full):
            self._jobs.put(done.set, timeout=seconds)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception as e:  # an error of one line, such as a character that the terminal cannot show: go on
                log_error("a line of the server's log could not be printed", e)
            if self._lost and self._jobs.empty():
                lost, self._lost = self._lost, 0
                console.say(f"{lost} lines were lost while this log could not be written")
