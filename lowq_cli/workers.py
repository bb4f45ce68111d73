"""Several tensors at once, on the CPU or on GPUs, results in order.

On the CPU each worker computes with its share of torch's threads. torch's own threads meet after every operation, and on a busy
machine they wait there for each other: rtn at 4 bits took 167 s per GB with 2 threads on 2 cores that others used too, 10 s
per GB with one. Workers meet only when their tensors are done.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import TypeVar

from lowq_cli.devices import AnyDevice
from lowq_packers.lazy import torch

MAX_WORKERS = 4  # on the CPU; each holds a slab of weights
# Workers of one GPU: while it computes for one, others read, sum and write. H100, 3.6 GB in memory: rtn 1.58 s with 1, 0.72
# with 4, 0.66 with 8; lsq 2.33, 1.09, 0.96; each holds 0.3 to 0.7 GB of the GPU.
GPU_WORKERS = 4
AHEAD = 16  # items given out before the result of the first is taken, per worker: results are small, items of all sizes
Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_devices(devices: tuple[AnyDevice, ...], independent: bool = True) -> tuple[AnyDevice, ...]:
    """The device of each tensor that is worked on at once: several on each GPU and on a single CPU.

    One where tensors are not `independent` of each other.
    """
    if not independent:
        return devices[:1]
    if devices[0].type == "cuda":
        return devices * GPU_WORKERS
    return devices * min(threads(), MAX_WORKERS) if len(devices) == 1 else devices


def threads() -> int:
    """Threads that torch computes with on the CPU; before it is imported, those it will take as it does by itself."""
    if "torch" in sys.modules:
        return torch.get_num_threads()
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) else len(os.sched_getaffinity(0))


def on_free_device(work: Callable[[Item, torch.device], Result], devices: Sequence[torch.device]) -> Callable[[Item], Result]:
    """`work` with a place of `devices` that no other call has at that time, on a GPU with a stream of its own.

    For as many threads as there are devices.
    """
    free: SimpleQueue[tuple[torch.device, torch.cuda.Stream | None]] = SimpleQueue()
    for device in devices:
        free.put((device, torch.cuda.Stream(device) if device.type == "cuda" else None))

    def on_a_free_one(item: Item) -> Result:
        device, stream = free.get()
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                return work(item, device)
        finally:
            free.put((device, stream))

    return on_a_free_one


@contextmanager
def in_order(
    items: Iterable[Item], work: Callable[[Item], Result], workers: int, ahead: int = AHEAD
) -> Iterator[Iterator[Result]]:
    """An iterator over `work` of each item, in their order; at most `workers` run at a time, in threads of their own.

    Items are drawn in this thread, `ahead` for each worker before the first result is out.

    Leaving the block waits for those that run and drops the rest. An exception of `work` comes out with its result.
    """
    with shared_threads(workers), _drained(ThreadPoolExecutor(workers)) as pool:
        yield _results(pool, items, work, ahead * workers)


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


def _results(pool: ThreadPoolExecutor, items: Iterable[Item], work: Callable[[Item], Result], most: int) -> Iterator[Result]:
    ahead: deque[Future[Result]] = deque()
    for item in items:
        ahead.append(pool.submit(work, item))
        if len(ahead) > most:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
