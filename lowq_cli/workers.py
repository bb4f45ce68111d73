"""Process several tensors in parallel, on the CPU or on GPUs, with results in order.

On the CPU each worker computes with its share of torch's threads. torch's threads synchronize after every operation, where they
wait for each other on a busy machine: on 2 cores that other processes used too, rtn at 4 bits took 167 s per GB with 2 threads
and 10 s per GB with 1 thread. Workers synchronize only when their tensors are done.
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

MAX_WORKERS = 4  # max. workers on the CPU; each holds a slab of weights
# Workers per GPU: while the GPU computes for one, the others read, sum and write. On an H100, with 3.6 GB of weights in
# memory, rtn took 1.58 s with 1 worker, 0.72 s with 4, 0.66 s with 8; lsq took 2.33 s, 1.09 s, 0.96 s. Each worker holds 0.3
# to 0.7 GB of GPU memory.
GPU_WORKERS = 4
AHEAD = 16  # items per worker that start before the first result is taken: results are small, item sizes vary
Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_devices(devices: tuple[AnyDevice, ...], independent: bool = True) -> tuple[AnyDevice, ...]:
    """The device of each parallel worker: several workers per GPU, and on a single CPU.

    It is one worker if the tensors are not `independent` of each other.
    """
    if not independent:
        return devices[:1]
    if devices[0].type == "cuda":
        return devices * GPU_WORKERS
    return devices * min(threads(), MAX_WORKERS) if len(devices) == 1 else devices


def threads() -> int:
    """Number of torch's CPU threads; before torch is imported, the number that it will use by default."""
    if "torch" in sys.modules:
        return torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() and int(setting) else len(os.sched_getaffinity(0))


def on_free_device(work: Callable[[Item, torch.device], Result], devices: Sequence[torch.device]) -> Callable[[Item], Result]:
    """`work`, called with an entry of `devices` that no concurrent call uses, and on a GPU with a separate stream.

    At most `len(devices)` threads may call it at a time.
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
    """An iterator over the results of `work` for each item, in order; at most `workers` calls run at a time, in new threads.

    Items are drawn in this thread; up to `ahead` per worker are drawn before the first result.

    Leaving the block waits for the running calls and drops the rest. An exception of `work` is raised in place of its result.
    """
    with shared_threads(workers), _drained(ThreadPoolExecutor(workers)) as pool:
        yield _results(pool, items, work, ahead * workers)


@contextmanager
def shared_threads(workers: int) -> Iterator[None]:
    """Inside the block, torch computes with one worker's share of its threads, in this thread and in threads started inside."""
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
