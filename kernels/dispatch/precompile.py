"""Compile kernels ahead of the calls that need them, several at a time.

Triton's compiler holds the interpreter lock for about half of its work. `compile_all` has worker processes compile, each
launching its share once on dummy inputs; the parent finds the binaries in Triton's cache on disk. That pays for the hundreds
of kernels that tuning tries; `launch_all` uses threads, for the dozen that one generation needs.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from time import monotonic

import torch

from lowq_kernels import workspaces
from lowq_kernels.dispatch.registry import Config, kernels
from lowq_packers.errors import device_lost, log_error
from lowq_packers.scheme import Scheme

WORKERS = 8
WORTH_WORKERS = 4  # fewer kernels than this compile faster in this process than a worker starts
MOST_ROWS = 128  # max. rows of x in one block of a CUDA kernel
SLOW = 1.0  # seconds after which `launch_all` reports progress; loading a dozen cubins takes half of that


@dataclass(frozen=True)
class Work:
    """One kernel to compile: what its binary depends on. Sizes matter only by what divides them."""

    kernel: str
    config: tuple[tuple[str, int], ...]
    scheme: Scheme
    layout: str
    dtype: torch.dtype
    M: int
    N: int
    K: int

    @classmethod
    def of(cls, kernel: str, config: Config, scheme: Scheme, layout: str, dtype: torch.dtype, M: int, N: int, K: int) -> "Work":
        """The work of one launch. No binary of Triton's depends on M; those of CUDA do, by powers of two up to 8 rows, then in
        steps of 8 up to MOST_ROWS."""
        rows = 1
        if kernel.startswith("cuda/"):
            rows = 1 << (M - 1).bit_length() if M <= 8 else min(-(-M // 8) * 8, MOST_ROWS)
        return cls(kernel, tuple(sorted(config.items())), scheme, layout, dtype, rows, N, K)


def compile_all(work: Sequence[Work], done: Callable[[int], None] | None = None, workers: int = WORKERS) -> int:
    """Compile each distinct item once; returns their number. Calls `done(n)` after each.

    A kernel that does not compile is left for the launch to report.
    """
    distinct = sorted(dict.fromkeys(work), key=lambda w: w.M)  # one binary for two M: the later one finds it in the cache
    workers = min(workers, os.cpu_count() or 1, len(distinct))
    if workers < 2 or len(distinct) < WORTH_WORKERS:
        for i, w in enumerate(distinct):
            _launch_once(w)
            if done:
                done(i + 1)
        return len(distinct)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        for i, _ in enumerate(pool.imap_unordered(_launch_once, distinct)):
            if done:
                done(i + 1)
    return len(distinct)


def launch_all(
    work: Sequence[Callable[[], object]], done: Callable[[int, int], None], workers: int = WORKERS, quiet_s: float = SLOW
) -> int:
    """Make every launch once, in threads: what NVRTC compiles, and few kernels of Triton's. Returns how many there were.

    For a process that will run these kernels itself: nothing is found again on disk, and no worker has to start. `done(n, of)`
    is called after each launch once `quiet_s` seconds have passed. A launch that fails is left for its real caller to report,
    but an error that loses the GPU is raised.
    """
    started = monotonic()

    def launch(item: Callable[[], object]) -> None:
        try:
            with torch.inference_mode():
                item()
        except Exception as e:  # of a compiler or a launch: the caller that needs the kernel meets it again
            if device_lost(e):
                raise  # the next caller would be blamed
            log_error("a kernel cannot be launched ahead of its use", e)

    with ThreadPoolExecutor(workers) as pool:
        for i, launched in enumerate(as_completed([pool.submit(launch, item) for item in work])):
            launched.result()
            if monotonic() - started > quiet_s:
                done(i + 1, len(work))
    workspaces.release()  # scratch memory of ended threads: 0.27 GB for eight of them
    return len(work)


def _launch_once(work: Work) -> None:
    from lowq_kernels.dispatch.measure import random_weight
    from lowq_kernels.dispatch.tuning import Shape

    device = torch.device("cuda")
    try:
        weight = random_weight(Shape(work.N, work.K, work.scheme, work.dtype), work.layout, device)
        x = torch.zeros(work.M, work.K, dtype=work.dtype, device=device)
        kernels()[work.kernel].launch(x, weight, None, dict(work.config))
        torch.cuda.current_stream().synchronize()
    except Exception as e:  # of a compiler or a launch: the timing run gets it again and reports it
        if device_lost(e):
            raise  # that run would report a lost GPU, without the cause
        log_error(f"{work.kernel} cannot be compiled ahead of its timing", e)
