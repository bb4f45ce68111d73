"""A step as a CUDA graph: recorded once, replayed with one launch."""

from collections.abc import Callable

import torch

from lowq_kernels import workspaces

WARM_UP = 2  # kernels compile and libraries take their workspaces before anything is recorded


class Captured:
    """A recorded step. Its inputs and outputs are the tensors that the step used."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph

    def replay(self) -> None:
        """Run the step on the current stream."""
        self.graph.replay()


def capture(step: Callable[[], object]) -> Captured:
    """Record `step`, after running it WARM_UP times. Raises RuntimeError where it cannot be recorded.

    A step that waits for the device, or whose shapes depend on values, cannot be.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with workspaces.released(), torch.cuda.graph(graph):
        step()
    return Captured(graph)
