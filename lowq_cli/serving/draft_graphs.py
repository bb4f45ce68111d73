"""A drafter's work after a pass as CUDA graphs: launched kernel by kernel, it keeps the host longer than the device.

An H200 served an 8B at 675 tokens/s alone and at 557 with an EAGLE-3 head that made no guesses, only because the host launched
the head's kernels after each pass (2026-11-29).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lowq_cli.engine.batch import refill, upload
from lowq_cli.engine.graph import Captured
from lowq_cli.serving.model_runner import ModelRunner
from lowq_packers.errors import device_lost, log_error, one_line

MOST = 128  # max. recordings: each takes memory beside the cache, up to 5 MB with a draft model, and none is ever dropped


@dataclass(frozen=True)
class After:
    """What a drafter computes after a pass: tensors of the pass, and sizes. It is recorded for each combination of these.

    hidden: the model's hidden states (P, H) that it reads, or its own (N, H) that it guesses from. result: that of
    `DraftPasses.run`, None after a pass without drafts. before (R,): the newest tokens before the pass, or None. M: rows. N:
    sequences. K: guesses of each. pieces: whether rows are pieces of prompts, the same in all that a `DraftGraphs` records.
    """

    hidden: Mapping[int, torch.Tensor]
    result: torch.Tensor | None = None
    before: torch.Tensor | None = None
    M: int = 0
    N: int = 0
    K: int = 0
    pieces: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes but P: a row says where its hidden state is, and nothing else of these is read."""
        return (self.M, self.N, self.K, *(0 if t is None else len(t) for t in (self.result, self.before)))

    def like(self, held: dict[int, torch.Tensor], most: int = 0) -> "After":
        """Return the same with other tensors. held: where recordings share those of hidden states; most: their least length."""
        for i, h in self.hidden.items():
            if i not in held or len(held[i]) < max(most, len(h)):
                held[i] = h.new_empty(max(most, len(h)), *h.shape[1:])
        result, before = (None if t is None else torch.empty_like(t) for t in (self.result, self.before))
        hidden = {i: held[i][: max(most, len(h))] for i, h in self.hidden.items()}
        return replace(self, hidden=hidden, result=result, before=before)

    def fill(self, other: "After") -> None:
        """Copy another one's tensors, which may have fewer hidden states, into these."""
        pairs = [(h, other.hidden[i]) for i, h in self.hidden.items()]
        for mine, given in (*pairs, (self.result, other.result), (self.before, other.before)):
            if mine is not None and given is not None:
                mine[: len(given)].copy_(given)


Compute = Callable[[torch.Tensor, After], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Recorded:
    """A recording and the tensors that it reads and writes. numbers: `DeviceDrafts` describes rows by them."""

    graph: Captured
    numbers: torch.Tensor
    after: After
    made: list[torch.Tensor]


class DraftGraphs:
    """The recordings of a drafter's work.

    Args:
        runner: the model's passes, whose memory pool the recordings share. compute: (numbers, After) -> tensors. held: the
            tensors of hidden states, which recordings share as one runs at a time. most: the largest P; 0 if `compute` reads
            all of the hidden states, whose number is N.
    Attributes:
        fresh: whether the last call of `run` did what later ones do not repeat: it loaded kernels, or recorded. reason: why
            there are no more recordings, or "".
    """

    def __init__(
        self, runner: ModelRunner, compute: Compute, held: dict[int, torch.Tensor] | None = None, most: int = 0
    ) -> None:
        self.runner, self.compute, self.fresh, self.reason = runner, compute, False, ""
        self._met: set[tuple[int, ...]] = set()
        self._failed = False  # whether a recording has failed; one may: a thread's first product in cuBLAS cannot be recorded
        self._recorded: dict[tuple[int, ...], Recorded] = {}
        self._held, self._most = {} if held is None else held, most

    def run(self, numbers: np.ndarray, after: After) -> Sequence[torch.Tensor]:
        """Return what is computed, in tensors that the next call overwrites. What comes the first time is launched, which loads
        its kernels, and recorded the second time."""
        key, device = after.sizes, self.runner.device
        known = self._recorded.get(key)
        self.fresh = known is None and not self.reason
        if known is None and key in self._met and not self.reason:
            known = self._record(key, numbers, after)
        self._met.add(key)
        if known is None:
            return self.compute(upload(numbers, device), after)
        refill(known.numbers, numbers)
        known.after.fill(after)
        known.graph.replay()
        return known.made

    def _record(self, key: tuple[int, ...], numbers: np.ndarray, after: After) -> Recorded | None:
        def step() -> None:
            for mine, found in zip(made, self.compute(place, own), strict=True):
                mine.copy_(found)

        try:
            place, own = upload(numbers, self.runner.device), after.like(self._held, self._most)
            own.fill(after)
            made = [torch.empty_like(t) for t in self.compute(place, own)]
            graph = self.runner.capture(step, self.runner.pool)
        except RuntimeError as e:  # as for the model's passes, or memory is full: then it is launched kernel by kernel
            if device_lost(e):
                raise
            self.reason, self._failed = one_line(e) if self._failed else "", True
            log_error("what a drafter computes after a pass is not recorded", e)
            return None
        self._recorded[key] = Recorded(graph, place, own, made)
        if len(self._recorded) == MOST:
            self.reason = f"there are {MOST}"
        return self._recorded[key]
