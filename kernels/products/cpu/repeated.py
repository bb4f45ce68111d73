"""A decode step on a CPU as one call of the library: its calls are recorded once and replayed by C++.

Python takes 13 to 45 us per product; a token of a 1B model needs 64 products and as many small operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowq_kernels.products.cpu import native, team

Step = Callable[[torch.Tensor], torch.Tensor]


class _Only(TorchDispatchMode):
    """Detects whether torch itself computes anything, beyond allocating memory and making views."""

    ALLOWED = ("empty", "empty_like", "slice", "select", "view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "detach")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch asks: True would import torch._dynamo, seconds before the second token
        return False

    def __init__(self) -> None:
        super().__init__()
        self.others = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, y = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name not in self.ALLOWED and not (name == "to" and y is args[0]):  # a bias may have the dtype asked for already
            self.others.add(name)
        return y


class Repeated:
    """fn(x) for one fn: its calls of the library are recorded at the first call and from then on replayed as one.

    x always has one shape, and everything else that fn reads and writes (weights, caches, positions) stays at its address. The
    result is the same tensor every time. If torch itself computes something, fn cannot be replayed and is called every time. So
    is every fn under torch's profiler, which then shows its calls by name.
    """

    def __init__(self, beside: "Repeated | None" = None) -> None:
        self.made: dict[int, Step | None] = {}  # torch's number of threads -> recording; None: fn cannot be replayed
        self.team: team.Team | team.Follower = team.Team()
        if beside is not None and isinstance(
            beside.team, team.Team
        ):  # steps that are few between its: it knows how busy cores are
            self.team = team.Follower(beside.team)

    def __call__(self, fn: Step, x: torch.Tensor) -> torch.Tensor:
        """fn(x)."""
        with self.team:
            return self._step(fn, x)

    def _step(self, fn: Step, x: torch.Tensor) -> torch.Tensor:
        if native.is_watched():
            return fn(x)
        n = torch.get_num_threads()
        if n in self.made:
            return (self.made[n] or fn)(x)
        x, native.noting.calls = x.clone(), list[Any]()
        try:
            with _Only() as torch_itself:
                y = fn(x)
            calls = native.noting.calls
        finally:
            native.noting.calls = None
        self.made[n] = None if torch_itself.others or not calls else _again(x, y, calls)
        return y


def _again(x: torch.Tensor, y: torch.Tensor, noted: list[Any]) -> Step:
    """Replays the recorded calls from x to y."""
    lib, which, calls = native.library(), native.isa()[0], (native.Call * len(noted))(*(call for call, _, _ in noted))

    def again(new: torch.Tensor) -> torch.Tensor:
        x.copy_(new)
        if (now := team.threads()) != noted[0][1].threads:
            for _, args, _ in noted:
                args.threads = now
        lib.lowq_cpu_run(which, calls, len(calls))  # type: ignore[union-attr]
        return y

    return again
