"""A decode step as a CUDA graph: recorded once, then replayed with one launch."""

from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch

from lowq_kernels import workspaces
from lowq_kernels.graphs import Graph
from lowq_packers.errors import device_lost

SMALLEST_BUCKET = 512
WARM_UP = 1  # runs before recording, in which kernels compile and libraries allocate workspaces

_one_at_a_time = Lock()  # all recordings share a stream: one would also record what another thread warms up there


class Captured:
    """A recorded step. It reads and writes the tensors that the step used; `logits` and `noted` are some of its outputs."""

    logits: torch.Tensor
    noted: dict[int, torch.Tensor] | None = None

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def replay(self) -> None:
        """Run the step on the current stream."""
        self.graph.replay()


def bucket(length: int) -> int:
    """Slots of a cache for `length` tokens: one of few numbers, so that recorded steps can be used for other sequences."""
    slots = SMALLEST_BUCKET
    while slots < length:
        slots *= 2
    return slots


def keep(state: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Copy tensors; returns a function that restores them. Needed because recording runs the step, which changes its state."""
    before = [t.clone() for t in state]

    def back() -> None:
        for t, saved in zip(state, before, strict=True):
            t.copy_(saved)

    return back


def capture(step: Callable[[], object], pool: Any = None) -> Captured:
    """Record `step`, after running it WARM_UP times. Raises RuntimeError where it cannot be recorded.

    pool: the memory pool of an earlier graph, which this graph shares; the two must never run at once. With a pool, torch's
    release of cached memory before each recording is skipped, and so are the warm-up runs: the caller has launched the kernels
    already. For the 59 recordings of a server on an H200 the release takes 2 s and the runs 1 s.

    A step that waits for the device, or whose shapes depend on values, cannot be recorded.
    """
    with _one_at_a_time:
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP if pool is None else 0):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.current_stream().synchronize()
        graph = Graph()
        with workspaces.released(), graph.recording(stream, pool):
            step()
    return Captured(graph)


def capture_unchanged(step: Callable[[], object], state: Sequence[torch.Tensor]) -> tuple[Captured | None, str]:
    """Record `step` and restore `state`, which recording changes; None and the reason where it cannot be recorded."""
    back, why = keep(state), ""
    graph: Captured | None = None
    try:
        graph = capture(step)
    except RuntimeError as e:  # the step waits for the device, or memory is full
        if device_lost(e):
            raise
        why = str(e).splitlines()[0]
    back()
    return graph, why


def capture_aside(step: Callable[[], object], pool: Any, recorded: Callable[[], None]) -> Captured:
    """Record `step` in a thread of its own while another one uses the device: nothing is run, and nothing waits for the device.

    The kernels of the step must have been launched before. pool: as of `capture`. recorded: called when all launches are
    recorded, before CUDA makes the graph, in which Python has no part. Raises RuntimeError where it cannot be recorded.
    """
    with _one_at_a_time:
        torch.cuda.current_blas_handle()  # a thread's first use of cuBLAS allocates memory, which a recording must not
        graph = Graph()
        with workspaces.released(), graph.recording(_stream(torch.cuda.current_device()), pool):
            step()
            recorded()
    return Captured(graph)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream for recording: all recordings share it, so that each reuses the memory that torch cached for earlier ones."""
    return torch.cuda.Stream(device)
