"""Work on a GPU that is recorded as a CUDA graph and replayed.

A training step on small layers is thousands of short kernels, and launching them one at a time takes longer than they run.
"""

from collections.abc import Callable
from typing import Any

import torch

from lowq_kernels.graphs import Graph


class Recorded:
    """Calls `work`, which takes tensors, may change others in place and returns a tensor.

    The first call runs it as it is, so that libraries and optimizers allocate what they hold; the second records it, and later
    ones replay the recording, which overwrites the tensor that the call before returned. Without a GPU, for tensors of other
    shapes, and where work cannot be recorded, every call runs it.

    failed: called if the recording failed, to drop gradients that were recorded only.
    """

    def __init__(self, work: Callable[..., torch.Tensor], device: torch.device, failed: Callable[[], None]) -> None:
        self.work, self.failed = work, failed
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graph: Graph | None = None
        self.inputs: list[torch.Tensor] = []  # the recording reads these
        self.out = torch.empty(0)

    def __call__(self, *inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        """others: arguments that do not change the recorded work."""
        if self.stream is None:
            return self.work(*inputs, **others)
        if not self.inputs:
            self.inputs = [t.clone() for t in inputs]
            return self._aside(*inputs, **others)
        if [t.shape for t in inputs] != [t.shape for t in self.inputs]:
            return self.work(*inputs, **others)
        for buffer, t in zip(self.inputs, inputs, strict=True):
            buffer.copy_(t)
        if self.graph is None and not self._record(**others):
            return self.work(*inputs, **others)
        assert self.graph is not None
        self.graph.replay()
        return self.out

    def _aside(self, *inputs: torch.Tensor, **others: Any) -> torch.Tensor:
        """One call on the stream that is recorded later: libraries hold memory for each stream."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            out = self.work(*inputs, **others)
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return out

    def _record(self, **others: Any) -> bool:
        graph = Graph()
        try:
            with graph.recording(self.stream):
                self.out = self.work(*self.inputs, **others)
        except RuntimeError:  # of work that waits for the GPU: calls run it from now on, where other errors come again
            self.stream, self.inputs = None, []
            self.failed()
            return False
        self.graph = graph
        return True


def adam(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Adam:
    """Adam of parameter groups. On a GPU its rates are tensors, which recorded steps read."""
    gpu = device.type == "cuda"
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), fused=gpu, capturable=gpu)
    for group in optimizer.param_groups if gpu else ():
        group["lr"] = torch.tensor(group["lr"], device=device)
    return optimizer


def set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
