"""How many threads a step takes: fewer while other processes keep cores busy.

A parallel region ends with its last thread, and one that waits for a core is given it a time slice later, 3 to 40 ms, in many
of a step's 50 regions: beside one busy process two threads made 38 tokens/s of a model of 0.5B weights where one made 107.
Choosing step by step makes 94 of them, and on a quiet machine what it was (benchmarks/notes/cpu.md, 2 cores). Bits do not
depend on the number of threads, so every step may take another.
"""

import threading
from time import perf_counter
from types import TracebackType

import torch

LATE = 8  # steps' worth of time lost, after which half the threads take over: less is a machine's noise
PATIENCE = 16  # times the time lost: so long they stay. Trying again then costs a 16th at most
_here = threading.local()  # .threads: of the step that this thread is in


def threads() -> int:
    """Threads that a call of the library takes: those of the step it is in, else torch's number."""
    return getattr(_here, "threads", 0) or torch.get_num_threads()


class Team:
    """The threads of steps of one shape, `with team:` around each, by the times of those before.

    Half the threads would take twice a step's least time, or less: the second step of all tries. What steps take beyond that
    is lost. Half the threads are halved again where that helps.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []  # when each halving does
        self.least: dict[int, float] = {}  # seconds, by how often halved: of the last steps in a row that were
        self.lost = 0.0

    def __enter__(self) -> None:
        _here.threads = max(1, torch.get_num_threads() >> len(self.ends))
        self.began = perf_counter()

    def __exit__(self, failed: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        now, many, _here.threads = perf_counter(), _here.threads > 1, 0
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
    """The threads of steps beside another team's, `with follower:` around each: as many as its next step takes."""

    def __init__(self, leader: Team) -> None:
        self.leader = leader

    def __enter__(self) -> None:
        _here.threads = max(1, torch.get_num_threads() >> len(self.leader.ends))

    def __exit__(self, failed: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        _here.threads = 0
