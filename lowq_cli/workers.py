"""Several tensors at once on the CPU, results in order.

Each worker computes with its share of torch's threads. torch's own threads meet after every operation, and on a busy
machine they wait there for each other: rtn at 4 bits took 167 s per GB with 2 threads on 2 cores that others used too, 10 s
per GB with one. Workers meet only when their tensors are done.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

MAX_WORKERS = 4  # each holds a slab of weights
Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count(device: torch.device, independent: bool = True) -> int:
    """How many tensors to work on at once: one on a GPU, and one where they are not `independent` of each other."""
    return min(torch.get_num_threads(), MAX_WORKERS) if device.type == "cpu" and independent else 1


@contextmanager
def in_order(items: Iterable[Item], work: Callable[[Item], Result], workers: int) -> Iterator[Iterator[Result]]:
    """An iterator over `work` of each item, in their order; at most `workers` run at a time, in threads of their own.

    Leaving the block waits for those that run and drops the rest. An exception of `work` comes out with its result.
    """
    with shared_threads(workers), _drained(ThreadPoolExecutor(workers)) as pool:
        yield _results(pool, items, work, workers)


@contextmanager
def shared_threads(workers: int) -> Iterator[None]:
    """Inside, torch computes with one worker's share of its threads, here and in threads that start meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _drained(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _results(pool: ThreadPoolExecutor, items: Iterable[Item], work: Callable[[Item], Result], workers: int) -> Iterator[Result]:
    ahead: deque[Future[Result]] = deque()
    for item in items:
        ahead.append(pool.submit(work, item))
        if len(ahead) > workers:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
