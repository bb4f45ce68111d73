"""The operations of a pass of a model, each with its weights; a plan is a flat list of them (plan.py).

A step reads and writes a `Frame`: the residual stream x (M, H), the current value y (M, ...), and values kept by name for later
steps. It calls an operation of `lowq_kernels.decode`; where no kernel takes the call, the operation's definition in torch does.
The steps that read what earlier tokens left (attention, recurrent layers) are in mixer_steps.py, those of mixtures of experts
in expert_steps.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from lowq_cli.engine.batch import Batch, KeyValues, States
from lowq_kernels.decode import Ops, activation
from lowq_kernels.decode.norms import Addition, Norm
from lowq_packers.arch.parts import Linear


@dataclass
class Frame:
    """The values that the steps of one pass read and write."""

    x: torch.Tensor
    batch: Batch
    state: Sequence[KeyValues | States]
    y: torch.Tensor = field(init=False)
    kept: dict[str, Any] = field(default_factory=dict)
    taps: dict[int, torch.Tensor] | None = None  # layer -> the stream that `Tap` copies for a draft head; None: no copies

    @property
    def ops(self) -> Ops:
        """The decode operations of the batch's device."""
        return self.batch.ops


class Step(ABC):
    """One operation of a plan. what: the kind of operation, a word. state: numbers of the states that it reads and writes."""

    what: ClassVar[str] = ""
    state: Sequence[int] = ()

    @abstractmethod
    def run(self, f: Frame) -> None:
        """Compute the step on a frame."""

    @property
    def base(self) -> "Step":
        """The step that takes its place in passes in which no row has an adapter."""
        return self

    def width(self, before: int) -> int:
        """The width of y after the step, given its width `before` the step."""
        return before

    def compiled_for(self) -> tuple[object, ...]:
        """The facts, besides the class of the step and the width of y, that select the kernel to compile for it."""
        return ()

    def reads(self, before: int) -> Mapping[str, int]:
        """Name -> width of each kept value that the step reads, given the width `before` of y."""
        return {}


def is_plain(norm: Norm) -> bool:
    """Whether a norm is an RMSNorm with a weight, without bias or groups, as `add_norm` takes it."""
    return norm.is_rms and norm.weight is not None


@dataclass(frozen=True, eq=False)
class AddNorm(Step):
    """x += y (with `post`, x += post(y)), then y = norm(x). With `first`, nothing is added."""

    norm: Norm
    post: torch.Tensor | None = None
    first: bool = False
    what = "norm"

    def compiled_for(self) -> tuple[object, ...]:
        return None if self.norm.weight is None else self.norm.weight.dtype, self.post is None, self.first

    def run(self, f: Frame) -> None:
        assert self.norm.weight is not None
        f.y = f.ops.add_norm(f.x, None if self.first else f.y, self.norm.weight, self.norm.eps, self.post)


@dataclass(frozen=True, eq=False)
class UpdateNorm(Step):
    """x = (x + scale * post(y)) * after, then y = norm(x), or y = x without a norm. With `first`, nothing is added.

    second: the name of a kept value that is added to y first and then removed. own: norms of y and of second before the sum.
    also: a second norm of x, kept under the name "also".
    """

    norm: Norm | None
    post: Norm | None = None
    scale: float = 1.0
    after: torch.Tensor | None = None
    first: bool = False
    second: str = ""
    own: tuple[Norm, Norm] | None = None
    also: Norm | None = None
    what = "norm"

    def compiled_for(self) -> tuple[object, ...]:
        norms = (self.norm, self.post, self.also, *(self.own or ()))
        facts = ((n.kind, n.weight is None or n.weight.dtype, n.bias is None, n.groups) for n in norms if n)
        return (*facts, *(n is None for n in norms), self.after is None, self.first, self.second)

    def reads(self, before: int) -> Mapping[str, int]:
        return {self.second: before} if self.second else {}

    def run(self, f: Frame) -> None:
        second = f.kept.pop(self.second) if self.second else None
        how, y = Addition(self.post, self.scale, self.after, second, self.own), None if self.first else f.y
        if self.norm is not None and self.also is not None:
            f.y, f.kept["also"] = f.ops.update_norms(f.x, y, (self.norm, self.also), how)
        elif self.norm is not None:
            f.y = f.ops.update_norm(f.x, y, self.norm, how)
        else:
            if y is not None:
                f.ops.add(f.x, y, how)
            f.y = f.x


def added(step: UpdateNorm) -> AddNorm | UpdateNorm:
    """The same as the `AddNorm` that computes it, where one does."""
    norm, post = step.norm, step.post
    simple = step.scale == 1.0 and step.after is None and not step.second and step.own is None and step.also is None
    if norm is None or not is_plain(norm) or not simple or (post and not (is_plain(post) and post.eps == norm.eps)):
        return step
    return AddNorm(norm, post.weight if post else None, first=step.first)


@dataclass(frozen=True, eq=False)
class Normed(Step):
    """y = norm(source) * by, where source is x, y or the name of a kept value; without a norm y = source * by."""

    norm: Norm | None
    source: str = "y"
    by: float = 1.0
    what = "norm"

    def compiled_for(self) -> tuple[object, ...]:
        n = self.norm
        return () if n is None else (n.kind, n.weight is None or n.weight.dtype, n.bias is None, n.groups)

    def reads(self, before: int) -> Mapping[str, int]:
        return {} if self.source in ("x", "y") else {self.source: before}

    def run(self, f: Frame) -> None:
        x = f.x if self.source == "x" else f.y if self.source == "y" else f.kept[self.source]
        x = x if self.norm is None else f.ops.normed(x, self.norm)
        f.y = x if self.by == 1.0 else x * self.by


@dataclass(frozen=True, eq=False)
class Tap(Step):
    """Copy the residual stream that enters a layer for a draft head; without a draft head, do nothing."""

    layer: int
    what = "add"

    def run(self, f: Frame) -> None:
        if f.taps is not None:
            f.taps[self.layer] = f.x.clone()


@dataclass(frozen=True, eq=False)
class Beside(Step):
    """y = the kept "embedding" and x concatenated, each normed first (see `parts.Beside`)."""

    embedding: Norm | None
    hidden: Norm | None
    hidden_first: bool = False
    zero_first: bool = False
    replaces: bool = False
    what = "norm"

    def width(self, before: int) -> int:
        return 2 * before

    def reads(self, before: int) -> Mapping[str, int]:
        return {"embedding": before}

    def run(self, f: Frame) -> None:
        e, h = f.kept["embedding"], f.x
        if self.zero_first:
            e = e.masked_fill((f.batch.positions == 0)[:, None], 0.0)
        pair = (h, e, self.hidden, self.embedding) if self.hidden_first else (e, h, self.embedding, self.hidden)
        f.y = f.ops.beside(*pair)
        if self.replaces:
            H = h.shape[-1]
            f.x = (f.y[:, :H] if self.hidden_first else f.y[:, H:]).contiguous()


@dataclass(frozen=True, eq=False)
class Begin(Step):
    """Start the residual stream: x = y."""

    what = "add"

    def run(self, f: Frame) -> None:
        f.x = f.y


@dataclass(frozen=True, eq=False)
class Keep(Step):
    """Keep y under a name; with `add`, add it to the value that is already kept under that name."""

    name: str
    add: bool = False
    what = "add"

    def run(self, f: Frame) -> None:
        f.kept[self.name] = f.kept[self.name] + f.y if self.add and self.name in f.kept else f.y


@dataclass(frozen=True, eq=False)
class Cut(Step):
    """Keep the values of a row from `at` on under a name; y is those before, where `whole` side by side in memory."""

    name: str
    at: int
    whole: bool = False
    what = "add"

    def width(self, before: int) -> int:
        return self.at

    def run(self, f: Frame) -> None:
        f.y, f.kept[self.name] = f.y[:, : self.at], f.y[:, self.at :]
        if self.whole:
            f.y = f.y.contiguous()


@dataclass(frozen=True, eq=False)
class Take(Step):
    """y = a kept value; with `last`, the kept value is removed. wide: its width, if not that of y before."""

    name: str
    last: bool = False
    wide: int = 0
    what = "add"

    def width(self, before: int) -> int:
        return self.wide or before

    def run(self, f: Frame) -> None:
        f.y = f.kept.pop(self.name) if self.last else f.kept[self.name]


@dataclass(frozen=True, eq=False)
class Product(Step):
    """y = layer(y). role: the product's role in its layer ("qkv"). part: its modules under the description's names."""

    layer: nn.Module
    role: str
    part: Linear | None = None
    what = "product"

    def width(self, before: int) -> int:
        return int(self.layer.out_features)  # type: ignore[arg-type]

    def run(self, f: Frame) -> None:
        f.y = self.layer(f.y)


@dataclass(frozen=True, eq=False)
class Gate(Step):
    """y = act(gate_scale * gate) * up, where y holds gate and up concatenated; y = act(y) without a gate."""

    act: str
    gated: bool = True
    gate_scale: float = 1.0
    what = "activation"

    def width(self, before: int) -> int:
        return before // 2 if self.gated else before

    def compiled_for(self) -> tuple[object, ...]:
        return self.act, self.gated, self.gate_scale == 1.0

    def run(self, f: Frame) -> None:
        if not self.gated:
            f.y = f.ops.activated(f.y, self.act)
        elif self.gate_scale == 1.0:
            f.y = f.ops.gated(f.y, self.act)
        else:
            f.y = f.ops.gated(f.y, self.act, self.gate_scale)


@dataclass(frozen=True, eq=False)
class Xielu(Step):
    """y = xIELU of y, with the scalars (1,) of the layer."""

    scalars: tuple[torch.Tensor, ...]
    what = "activation"

    def run(self, f: Frame) -> None:
        f.y = activation.xielu(f.y, *self.scalars)


@dataclass(frozen=True, eq=False)
class Clip(Step):
    """y = y clamped to -limit .. limit."""

    limit: float
    what = "attention"

    def run(self, f: Frame) -> None:
        f.y = f.y.clamp(-self.limit, self.limit)


@dataclass(frozen=True, eq=False)
class Open(Step):
    """y *= sigmoid(a kept value); the kept value is removed."""

    name: str
    what = "activation"

    def reads(self, before: int) -> Mapping[str, int]:
        return {self.name: before}

    def run(self, f: Frame) -> None:
        f.y = f.ops.opened(f.y, f.kept.pop(self.name))


@dataclass(frozen=True, eq=False)
class OpenBy(Step):
    """y *= sigmoid(x w^T) with w (1, H) and x a kept value."""

    weight: torch.Tensor
    name: str
    what = "activation"

    def reads(self, before: int) -> Mapping[str, int]:
        return {self.name: self.weight.shape[1]}

    def run(self, f: Frame) -> None:
        f.y = f.ops.opened_by(f.y, f.kept[self.name], self.weight)


@dataclass(frozen=True, eq=False)
class Drop(Step):
    """Remove a kept value."""

    name: str
    what = "add"

    def run(self, f: Frame) -> None:
        del f.kept[self.name]


@dataclass(frozen=True, eq=False)
class TimesToken(Step):
    """y = act(y) times the token's row of the per-layer token table, for this layer."""

    layer: int
    act: str
    what = "activation"

    def compiled_for(self) -> tuple[object, ...]:
        return (self.act,)

    def reads(self, before: int) -> Mapping[str, int]:
        return {"table": before * (self.layer + 1)}

    def run(self, f: Frame) -> None:
        N = f.y.shape[1]
        f.y = f.ops.activated(f.y, self.act, f.kept["table"][:, self.layer * N : (self.layer + 1) * N])


@dataclass(frozen=True, eq=False)
class AddFeatures(Step):
    """x of an image's rows += the features that the vision tower computed for this layer."""

    layer: int
    what = "add"

    def run(self, f: Frame) -> None:
        if f.batch.pictures is not None:
            f.batch.pictures.add(f.x, self.layer)
