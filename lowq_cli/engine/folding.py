"""Fold neighbouring steps of a plan into one product: products then also compute norms, residual adds and gates next to them.

Three rewrites of the list of steps, where `fold.why_not` allows a product for the number of rows:
    product, norm, product [, gate]   product_add, norm_product [norm_product_gate]
    product, gate                     product_gate
and one where a kernel takes both (`SharedExperts`):
    experts, product, gate, product   experts with their shared expert

For more rows than a decode step has (STEPS), a gate or a norm and the product behind it become one step, which rounds what they
make to 8 bits where the layer does (`--act`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowq_cli.engine import steps as s
from lowq_cli.engine.expert_steps import Experts, Route
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.activations import STEPS
from lowq_kernels.decode import FoldedProducts, Ops
from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.decode.norms import Norm
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.modules.stack import Shared

SCALE, STREAM = "scale", "stream"


@dataclass(frozen=True, eq=False)
class _Folded(s.Step):
    """A product with the steps around it fused in. act: the activation of the gate behind it, or "" without a gate."""

    layer: Any
    role: str
    act: str = ""
    what = "product"

    def width(self, before: int) -> int:
        return int(self.layer.out_features) // (2 if self.act else 1)

    def compiled_for(self) -> tuple[object, ...]:
        return (self.role, *_facts(self.layer))


@dataclass(frozen=True, eq=False)
class ProductAdd(_Folded):
    """x += layer(y), together with the values of the new x that the next norm needs."""

    norm: Norm = field(kw_only=True)

    def run(self, f: s.Frame) -> None:
        fold = f.ops.fold
        assert fold is not None
        assert self.norm.weight is not None
        f.kept[STREAM] = fold.product_add(self.layer, f.y, f.x, self.norm.weight, self.norm.eps, f.kept[SCALE])


@dataclass(frozen=True, eq=False)
class NormProduct(_Folded):
    """y = layer(norm(x)), or with `act` the gate of that, from the values of the preceding `ProductAdd`."""

    def run(self, f: s.Frame) -> None:
        fold, stream = f.ops.fold, f.kept[STREAM]
        assert fold is not None
        if self.act:
            f.y, f.kept[SCALE] = fold.norm_product_gate(self.layer, stream, self.act)
        else:
            f.y, f.kept[SCALE] = fold.norm_product(self.layer, stream)


@dataclass(frozen=True, eq=False)
class ProductGate(_Folded):
    """y = act(gate) * up, where layer(y) holds gate and up."""

    def run(self, f: s.Frame) -> None:
        assert f.ops.fold is not None
        f.y = f.ops.fold.product_gate(self.layer, f.y, self.act)


@dataclass(frozen=True, eq=False)
class SharedExperts(Experts):
    """y = the weighted sum of a token's experts, plus the shared expert's output."""

    shared: Shared = field(kw_only=True)

    def compiled_for(self) -> tuple[object, ...]:
        return (*self.shared.facts, self.shared.opening is None)

    def run(self, f: s.Frame) -> None:
        f.y = self.experts.with_shared(f.y, f.kept.pop("ids"), f.kept.pop("weights"), self.shared)


@dataclass(frozen=True, eq=False)
class _Rounding(s.Step):
    """A step and the product behind it; one launch makes and rounds what the product reads, where the layer rounds."""

    before: s.Step
    product: s.Product
    what = "product"

    @abstractmethod
    def rounded(self, f: s.Frame) -> torch.Tensor | None:
        """The product's output; None where the two steps run by themselves."""

    def width(self, before: int) -> int:
        return self.product.width(before)

    def compiled_for(self) -> tuple[object, ...]:
        return (*self.before.compiled_for(), *_facts(self.product.layer), getattr(self.product.layer, "act", "none"))

    def run(self, f: s.Frame) -> None:
        y = self.rounded(f)
        if y is None:
            self.before.run(f)
            self.product.run(f)
        else:
            f.y = y


@dataclass(frozen=True, eq=False)
class GateProduct(_Rounding):
    """y = layer(act(gate) * up), where y holds gate and up."""

    before: s.Gate

    def rounded(self, f: s.Frame) -> torch.Tensor | None:
        assert f.ops.gate_product is not None
        return f.ops.gate_product(self.product.layer, f.y, self.before.act)


@dataclass(frozen=True, eq=False)
class RoundedNormProduct(_Rounding):
    """x += y, then y = layer(norm(x))."""

    before: s.AddNorm

    def rounded(self, f: s.Frame) -> torch.Tensor | None:
        norm = self.before.norm
        assert f.ops.norm_product is not None
        assert norm.weight is not None
        return f.ops.norm_product(self.product.layer, f.x, None if self.before.first else f.y, norm.weight, norm.eps)


def _facts(layer: Any) -> tuple[object, ...]:
    return layer.out_features, layer.in_features, getattr(layer, "scheme", None), layer.bias is None


def blank(step: s.Step, ops: Ops, M: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Dummy values (zeros and ones) of the kept values that a folded step of M rows reads."""
    fold = ops.fold
    if fold is None or not isinstance(step, _Folded):
        return {}
    scale, K = torch.ones(M, dtype=torch.float32, device=device), step.layer.in_features
    squares = torch.ones(M, K // fold.SQUARES, dtype=torch.float32, device=device)
    x = torch.zeros(M, K, dtype=dtype, device=device)
    return {SCALE: scale, STREAM: fold.Residual(x, squares, scale, 1e-6)}


def fold(steps: list[s.Step], ops: Ops, M: int, dtype: torch.dtype) -> list[s.Step]:
    """The steps for M rows with neighbours folded; the same list object where nothing is folded."""
    if ops.fold is None:
        return steps
    joined = with_shared(steps, M, dtype)
    folded = (
        (_with_rounding(joined, ops) if ops.gate_product else joined) if M > STEPS else _fold_products(joined, ops, M, dtype)
    )
    return steps if folded is joined and len(joined) == len(steps) else folded


def with_shared(steps: list[s.Step], M: int, dtype: torch.dtype) -> list[s.Step]:
    """The steps with experts and their shared expert as one step, where a kernel computes both for M rows."""
    made, i = list[s.Step](), 0
    while i < len(steps):
        joined = _shared(steps[i:][:11], M, dtype)
        made += joined[0] if joined else [steps[i]]
        i += joined[1] if joined else 1
    return made


def _shared(steps: list[s.Step], M: int, dtype: torch.dtype) -> tuple[list[s.Step], int] | None:
    """What replaces the first of these steps, and how many of them; None where no kernel takes them.

    A branch of a parallel block, whose norm does not add "routed", stays as it is.
    """
    opening: s.OpenBy | None = None
    match steps:  # as `Compiler` emits them
        case [
            s.Keep(), Route() as route, Experts() as routed, s.Keep(name="routed"), s.Take(), s.Product() as up,
            s.Gate() as gate, s.Product() as down, s.OpenBy() as opening, s.Drop(), s.UpdateNorm(second="routed") as norm,
        ]:  # fmt: skip
            taken = 11
        case [
            s.Keep(), Route() as route, Experts() as routed, s.Keep(name="routed"), s.Take(), s.Product() as up,
            s.Gate() as gate, s.Product() as down, s.Drop(), s.UpdateNorm(second="routed") as norm, *_,
        ]:  # fmt: skip
            taken = 10
        case _:
            return None
    experts, weight = routed.experts, None if opening is None else opening.weight.flatten()
    if not isinstance(experts, QuantExperts) or routed.weigh_inputs or gate.gate_scale != 1.0:
        return None
    act = gate.act if gate.gated else UNGATED + gate.act
    if experts.activation != act or (weight is not None and weight.dtype != dtype) or not (_plain(up) and _plain(down)):
        return None
    shared = Shared(up.layer.packed, down.layer.packed, weight)  # type: ignore[arg-type]
    if experts.fused(dtype, route.facts.top_k, M, shared) is None:
        return None
    return [route, SharedExperts(experts, shared=shared), s.added(replace(norm, second=""))], taken


def _plain(product: s.Product) -> bool:
    """Whether a product is only that of a packed weight, by whichever kernel."""
    layer = product.layer
    return type(layer) is QuantLinear and layer.bias is None and layer.kernel is None and layer.act == "none"


def _fold_products(steps: list[s.Step], ops: Ops, M: int, dtype: torch.dtype) -> list[s.Step]:
    assert ops.fold is not None
    folded, i = list[s.Step](), 0
    entering = False  # whether the product at i follows a ProductAdd
    while i < len(steps):
        step, rest = steps[i], steps[i + 1 :][:3]
        gate = rest[0] if rest and isinstance(rest[0], s.Gate) and _folds_gate(rest[0], ops.fold) else None
        if entering:
            assert isinstance(step, s.Product)
            with_gate = gate is not None and not ops.fold.why_not(
                step.layer, M, dtype, ops.fold.NORMED | ops.fold.ACTS[gate.act]
            )
            folded.append(NormProduct(step.layer, step.role, gate.act if gate and with_gate else ""))
            i += 2 if with_gate else 1
            entering = False
        elif isinstance(step, s.Product) and _adds(step, rest, ops.fold, M, dtype):
            assert isinstance(rest[0], s.AddNorm)
            folded.append(ProductAdd(step.layer, step.role, norm=rest[0].norm))
            i, entering = i + 2, True
        elif isinstance(step, s.Product) and gate and not ops.fold.why_not(step.layer, M, dtype, ops.fold.ACTS[gate.act]):
            folded.append(ProductGate(step.layer, step.role, gate.act))
            i += 2
        else:
            folded.append(step)
            i += 1
    return folded if len(folded) < len(steps) else steps


def _with_rounding(steps: list[s.Step], ops: Ops) -> list[s.Step]:
    """The steps with each gate or norm and the product behind it as one; the same list object without such a pair."""
    found = list[s.Step]()
    for step in steps:
        last = found[-1] if found and type(step) is s.Product else None
        if isinstance(last, s.Gate) and last.gated and last.gate_scale == 1.0:
            assert isinstance(step, s.Product)
            found[-1] = GateProduct(last, step)
        elif isinstance(last, s.AddNorm) and last.post is None and ops.norm_product:
            assert isinstance(step, s.Product)
            found[-1] = RoundedNormProduct(last, step)
        else:
            found.append(step)
    return found if len(found) < len(steps) else steps


def _folds_gate(gate: s.Gate, fold: FoldedProducts) -> bool:
    return gate.gated and gate.gate_scale == 1.0 and gate.act in fold.ACTS


def _adds(step: s.Product, rest: Sequence[s.Step], fold: FoldedProducts, M: int, dtype: torch.dtype) -> bool:
    """Whether a product, the norm after it and the next product can become a `ProductAdd` and a `NormProduct`."""
    if len(rest) < 2 or not isinstance(rest[0], s.AddNorm) or not isinstance(rest[1], s.Product):
        return False
    norm = rest[0].norm
    if rest[0].post is not None or norm.weight is None or norm.weight.dtype != dtype:
        return False
    how = fold.NORMED
    gate = rest[2] if len(rest) > 2 and isinstance(rest[2], s.Gate) and _folds_gate(rest[2], fold) else None
    if gate:
        how |= fold.ACTS[gate.act]
    return not fold.why_not(step.layer, M, dtype, fold.ADDED) and not fold.why_not(rest[1].layer, M, dtype, how)
