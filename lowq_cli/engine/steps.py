"""The operations that a pass of a model consists of, each with its weights: a plan is a flat list of them (plan.py).

A step reads and writes a `Frame`: the residual stream x (M, H), the current value y (M, ...), and values kept by name for steps
further on. Its arithmetic is an operation of `lowq_kernels.decode`, whose definition in torch computes what no kernel takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from lowq_cli.engine.batch import Batch, KeyValues, States
from lowq_kernels.decode import Ops
from lowq_kernels.decode.reference import Heads
from lowq_packers.arch.parts import Rope


@dataclass
class Frame:
    """What the steps of one pass hand to one another."""

    x: torch.Tensor
    batch: Batch
    state: Sequence[KeyValues | States]
    y: torch.Tensor = field(init=False)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def ops(self) -> Ops:
        """The operations of its device."""
        return self.batch.ops


class Step(ABC):
    """One operation of a plan. what: its name, for people. state: numbers of the states that it reads and writes."""

    what: ClassVar[str] = ""
    state: Sequence[int] = ()

    @abstractmethod
    def run(self, f: Frame) -> None:
        """Compute it."""

    def width(self, before: int) -> int:
        """Values of a row of y after it, where `before` were."""
        return before

    def compiled_for(self) -> tuple[object, ...]:
        """What, beside its kind and the width of y, decides which kernel is compiled for it."""
        return ()


@dataclass(frozen=True, eq=False)
class NormWeights:
    """A norm's tensors: weight (H,) with Gemma's 1 + w already added, or None; bias (H,) or None."""

    weight: torch.Tensor | None
    eps: float
    kind: str = "rms"
    bias: torch.Tensor | None = None
    groups: int = 1

    @property
    def plain(self) -> bool:
        """Whether it is an RMSNorm with a weight and nothing else, which `add_norm` takes."""
        return self.kind == "rms" and self.weight is not None and self.bias is None and self.groups == 1


@dataclass(frozen=True, eq=False)
class AddNorm(Step):
    """x += y (y normed by `post` first, where there is one), y = norm(x); with `first`, there is nothing to add yet."""

    norm: NormWeights
    post: torch.Tensor | None = None
    first: bool = False
    what = "norm"

    def compiled_for(self) -> tuple[object, ...]:
        return None if self.norm.weight is None else self.norm.weight.dtype, self.post is None, self.first

    def run(self, f: Frame) -> None:
        assert self.norm.weight is not None
        f.y = f.ops.add_norm(f.x, None if self.first else f.y, self.norm.weight, self.norm.eps, self.post)


@dataclass(frozen=True, eq=False)
class Add(Step):
    """x <- (x + scale * post(y)) * after."""

    post: NormWeights | None = None
    scale: float = 1.0
    after: torch.Tensor | None = None
    what = "add"

    def run(self, f: Frame) -> None:
        f.ops.add(f.x, f.y if self.post is None else _normed(f, self.post, f.y), self.scale, self.after)


@dataclass(frozen=True, eq=False)
class Normed(Step):
    """y = norm(source), the source x, y or a kept value; without a norm y is the source."""

    norm: NormWeights | None
    source: str = "y"
    by: float = 1.0
    what = "norm"

    def run(self, f: Frame) -> None:
        x = f.x if self.source == "x" else f.y if self.source == "y" else f.kept[self.source]
        x = x if self.norm is None else _normed(f, self.norm, x)
        f.y = x if self.by == 1.0 else x * self.by


def _normed(f: Frame, n: NormWeights, x: torch.Tensor) -> torch.Tensor:
    return f.ops.normed(x, n.weight, n.eps, n.kind, n.bias, n.groups)


@dataclass(frozen=True, eq=False)
class Keep(Step):
    """The current value under a name; with `add`, added to what has that name already."""

    name: str
    add: bool = False
    what = "add"

    def run(self, f: Frame) -> None:
        f.kept[self.name] = f.kept[self.name] + f.y if self.add and self.name in f.kept else f.y


@dataclass(frozen=True, eq=False)
class Take(Step):
    """y is a kept value, which is let go with `last`."""

    name: str
    last: bool = False
    what = "add"

    def run(self, f: Frame) -> None:
        f.y = f.kept.pop(self.name) if self.last else f.kept[self.name]


@dataclass(frozen=True, eq=False)
class Product(Step):
    """y = layer(y). role: which product of the layer it is."""

    layer: nn.Module
    role: str
    what = "product"

    def width(self, before: int) -> int:
        return int(self.layer.out_features)  # type: ignore[arg-type]

    def run(self, f: Frame) -> None:
        f.y = self.layer(f.y)


@dataclass(frozen=True, eq=False)
class Gate(Step):
    """y = act(gate_scale * gate) * up of (gate, up) side by side; y = act(y) where nothing gates."""

    act: str
    gated: bool = True
    gate_scale: float = 1.0
    what = "activation"

    def width(self, before: int) -> int:
        return before // 2 if self.gated else before

    def compiled_for(self) -> tuple[object, ...]:
        return self.act, self.gated

    def run(self, f: Frame) -> None:
        if not self.gated:
            f.y = f.ops.activated(f.y, self.act)
        elif self.gate_scale == 1.0:
            f.y = f.ops.gated(f.y, self.act)
        else:
            f.y = f.ops.gated(f.y, self.act, self.gate_scale)


@dataclass(frozen=True, eq=False)
class Attend(Step):
    """Attention of y = q, k, v; the layer's keys and values are state number `index`."""

    index: int
    heads: Heads
    rope: Rope
    what = "attention"

    @property
    def state(self) -> Sequence[int]:
        return (self.index,)

    def width(self, before: int) -> int:
        return self.heads.HQ * self.heads.D

    def compiled_for(self) -> tuple[object, ...]:
        h = self.heads
        return h.HQ, h.HKV, h.D, h.window > 0, h.q_norm is None, h.sinks is None, self.rope.dims

    def run(self, f: Frame) -> None:
        held = f.state[self.index]
        assert isinstance(held, KeyValues)
        f.y = f.batch.attend(f.y, held, f.batch.angles[self.rope], self.heads)


@dataclass(frozen=True, eq=False)
class Experts(Step):
    """y = the weighted sum of a token's experts. route: what `ops.route` takes after x."""

    experts: Any
    route: tuple[Any, ...]
    what = "experts"

    def run(self, f: Frame) -> None:
        f.y = self.experts(f.y, *f.ops.route(f.y, *self.route))
