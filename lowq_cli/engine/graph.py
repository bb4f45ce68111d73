"""A step as a CUDA graph: recorded once, replayed with one launch."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from lowq_kernels import workspaces

SMALLEST_BUCKET = 512
WARM_UP = 1  # kernels compile and libraries take their workspaces before anything is recorded


class Captured:
    """A recorded step. Its inputs and outputs are the tensors that the step used; logits, noted: those of the step."""

    logits: torch.Tensor
    noted: dict[int, torch.Tensor] | None = None

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph

    def replay(self) -> None:
        """Run the step on the current stream."""
        self.graph.replay()


def bucket(length: int) -> int:
    """Slots of a cache that holds `length` tokens: few different numbers, so that what was recorded serves other texts."""
    slots = SMALLEST_BUCKET
    while slots < length:
        slots *= 2
    return slots


def keep(state: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Copy tensors; the function that writes them back. Recording a step runs it, and so moves what the step moves."""
    before = [t.clone() for t in state]

    def back() -> None:
        for t, kept in zip(state, before, strict=True):
            t.copy_(kept)

    return back


def capture(step: Callable[[], object], pool: Any = None) -> Captured:
    """Record `step`, after running it WARM_UP times. Raises RuntimeError where it cannot be recorded.

    pool: of an earlier graph, whose memory this one may use too, as long as the two never run at once. Nothing is given back to
    the device then, as torch does before each recording, and nothing is run before: who records many steps has launched their
    kernels. Of the 59 recordings of a server on an H200 the one is 2 s, the other 1.

    A step that waits for the device, or whose shapes depend on values, cannot be.
    """
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP if pool is None else 0):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with workspaces.released():
        if pool is None:
            with torch.cuda.graph(graph, stream=stream):
                step()
        else:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool)
                try:
                    step()
                finally:
                    graph.capture_end()
    return Captured(graph)


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The one that steps are recorded on: what their first runs leave in torch's cache of memory, the next ones take."""
    return torch.cuda.Stream(device)
