"""Recurrent mixers, whose state has a fixed size: gated delta, Mamba2, short convolutions. Definitions, in torch.

Each has a dataclass of facts and weights, and two forms of one operation, in place on the states: tensors (slots, ...) by name,
as `parts.Recurrent` names them. The state of a new sequence is zeros:

    step  x (B, N), slots (B,) int64: one token of each of B sequences, by operations that a CUDA graph can hold
    run   x (T, N), slot int: the next T tokens of one sequence; with any cut of a text into runs the same, up to rounding

A kernel takes the runs of several sequences at once (`Runs`).

x is what the mixer's input product gives, y (B or T, features) what its output product reads: norm and gate are included. All
is in fp32, and rounded once to x's dtype; what is remembered of a convolution is rounded to the dtype that it is held in.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from lowq_kernels.decode.runs import CHUNK as CHUNK
from lowq_kernels.decode.runs import Run as Run
from lowq_kernels.decode.runs import Runs
from lowq_kernels.dispatch.registry import AnyCall, select

States = Mapping[str, torch.Tensor]
SEGMENT = 1024  # max. tokens at once, which bounds the memory of intermediate tensors


class Facts(Protocol):
    """The methods of a mixer's dataclass that dispatch uses."""

    def call(self, x: torch.Tensor, run: bool) -> AnyCall: ...


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence that are computed one after another, as steps: slot (1,) int64 of its state, copies (T - 1,)
    int64: slots that receive a snapshot of the state after each token but the last."""

    slot: torch.Tensor
    copies: torch.Tensor


Places = torch.Tensor | Runs | Rows  # the slots of a step, runs, or rows of one sequence


@dataclass(frozen=True)
class Mixer:
    """Both forms of one mixer."""

    step: Callable[..., torch.Tensor]
    run: Callable[..., torch.Tensor]

    def either(self, x: torch.Tensor, f: Any, states: States, places: Places, *config: Any) -> torch.Tensor:
        """The form for `places`, as a kernel of the registry."""
        if isinstance(places, torch.Tensor):
            return self.step(x, f, states, places)
        if isinstance(places, Rows):
            return self.rows(x, f, states, places)
        if not places.each:
            raise RuntimeError("the table of runs is only on the device, and the torch definition needs it on the host")
        runs = self.flushed if x.is_cpu else self.run
        parts = [(run, runs(x[run.first : run.end], f, states, run.slot)) for run in places.each]
        if len(parts) == 1 and places.whole:
            return parts[0][1]
        y = x.new_zeros(x.shape[0], parts[0][1].shape[1])
        for run, part in parts:
            y[run.first : run.end] = part
        return y

    def flushed(self, *operands: Any) -> torch.Tensor:
        """`run` where denormal numbers are 0: decays of a chunk multiply to many of them, with which a CPU computes 20 times as
        slowly. 1,000 tokens of a Qwen 3.5 of 22M parameters took 1.08 s on one core instead of 0.6."""

        def run() -> torch.Tensor:
            torch.set_num_threads(threads)
            with torch.inference_mode(mode):
                return self.run(*operands)

        threads, mode = torch.get_num_threads(), torch.is_inference_mode_enabled()
        return _flushing().submit(run).result()

    def rows(self, x: torch.Tensor, f: Any, states: States, places: Rows) -> torch.Tensor:
        """Steps x (T, N) of one sequence, by operations that a CUDA graph can capture."""
        y = []
        for i in range(x.shape[0]):
            y.append(self.step(x[i : i + 1], f, states, places.slot))
            if i < places.copies.shape[0]:
                for t in states.values():
                    t.index_copy_(0, places.copies[i : i + 1], t.index_select(0, places.slot))
        return torch.cat(y)


@cache
def _flushing() -> ThreadPoolExecutor:
    """A thread that takes denormal numbers for 0, as those do that its products start: a thread begins with the mode of its
    maker, so the threads that exist already would not."""
    return ThreadPoolExecutor(1, "recurrent", lambda: torch.set_flush_denormal(True))


def dispatched(x: torch.Tensor, f: Facts, states: States, places: Places) -> torch.Tensor:
    """Either form, by the kernel that dispatch chooses: launch(x, facts, states, places, config) -> y."""
    spec, config = select(f.call(x, isinstance(places, Runs)))
    return spec.launch(x, f, states, places, config)


def taken(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """States (B, ...) of slots in fp32, for `put`. On a CPU a single one is a view, which saves a third of a step's passes."""
    if state.is_cpu and state.dtype == torch.float32 and slots.shape[0] == 1:
        return state.narrow(0, int(slots[0]), 1)
    return state[slots].float()


def put(state: torch.Tensor, slots: torch.Tensor, changed: torch.Tensor) -> None:
    """Write back the states that `taken` returned."""
    if not (state.is_cpu and changed.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()):
        state[slots] = changed.to(state.dtype)


def chunked(x: torch.Tensor, size: int) -> torch.Tensor:
    """(T, heads, ...) -> (heads, chunks, size, ...), zeros after the last token."""
    pad = -x.shape[0] % size
    if pad:
        x = torch.cat((x, x.new_zeros(pad, *x.shape[1:])))
    return x.unflatten(0, (-1, size)).movedim(2, 0)


def unchunked(y: torch.Tensor, T: int) -> torch.Tensor:
    """(heads, chunks, size, dim) -> (T, heads, dim)."""
    return y.flatten(1, 2)[:, :T].transpose(0, 1)


def decays(log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tokens' decays of the state in log space, (heads, chunks, size): those from a chunk's begin to its tokens, from its
    tokens to its end, and from token j to token i (heads, chunks, size, size), 0 for j > i. The sums are in fp64: what is used
    are differences of large ones."""
    total = log.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).float()
    after = torch.ones(between.shape[-2:], dtype=torch.bool, device=log.device).triu_(1)
    return total.float().exp(), (total[..., -1:] - total).float().exp(), between.masked_fill_(after, -torch.inf).exp_()
