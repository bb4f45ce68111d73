"""The number of threads of a step: fewer while other processes keep cores busy.

A parallel region ends with its last thread. A thread that waits for a core gets it one time slice later, 3 to 40 ms, in many of
a step's 50 regions: next to one busy process, a model of 0.5B weights made 38 tokens/s with two threads and 107 with one.
Choosing per step makes 94, and on a quiet machine as many as before (benchmarks/notes/cpu.md, 2 cores). The result does not
depend on the number of threads, so each step may use another.
"""

import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

import torch

LATE = 8  # halve the threads once the time lost exceeds this many steps; less is noise
PATIENCE = 16  # keep the halved threads for this multiple of the time lost: trying again then costs at most 1/16
_here = threading.local()  # .threads: the number of threads of this thread's current step


def threads() -> int:
    """The number of threads of a call of the library: its step's number, else torch's."""
    return getattr(_here, "threads", 0) or torch.get_num_threads()


class Team:
    """Chooses the threads of steps of one shape from the times of earlier steps; use `with team:` around each step.

    Half the threads take at most twice the least time of a step; time beyond that counts as lost. Halved threads are halved
    again if that helps. clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.ends: list[float] = []  # when each halving does
        self.least: dict[int, float] = {}  # seconds, by how often halved: of the last steps in a row that were
        self.lost = 0.0

    def __enter__(self) -> None:
        _here.threads = max(1, torch.get_num_threads() >> len(self.ends))
        self.began = self.clock()

    def __exit__(self, failed: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        now, many, _here.threads = self.clock(), _here.threads > 1, 0
        if failed is None:
            self._note(now - self.began, now, many)

    def _note(self, seconds: float, now: float, many: bool) -> None:
        halved = len(self.ends)
        least = self.least[halved] = min(seconds, self.least.get(halved, seconds))
        if halved and now >= self.ends[-1]:
            self._halve(self.ends[:-1])
        elif many and halved + 1 not in self.least:
            self._halve([*self.ends, now])  # for one step
        elif many:
            half = min(2 * least, self.least[halved + 1])
            self.lost = max(0.0, self.lost + seconds - half)
            if self.lost > LATE * half:
                self._halve([*self.ends, now + PATIENCE * self.lost])

    def _halve(self, ends: list[float]) -> None:
        self.ends, self.lost = ends, 0.0
        self.least.pop(len(ends), None)


class Follower:
    """Steps that use as many threads as the next step of another team; use `with follower:` around each step."""

    def __init__(self, leader: Team) -> None:
        self.leader = leader

    def __enter__(self) -> None:
        _here.threads = max(1, torch.get_num_threads() >> len(self.leader.ends))

    def __exit__(self, failed: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        _here.threads = 0
