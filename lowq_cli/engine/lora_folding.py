"""Steps with LoRA adapters whose low-rank additions are part of the norms and gates next to their products.

    NORMS   norm, product                  norm and shrink, product and expand
            norm, product, gate, product   norm and shrink, product, expand and gate and shrink, product and expand
    GATES   product, gate                  product, shrink beside it, expand and gate

A layer then takes four launches for its adapters instead of eight, or seven, four of which run beside products. For up to
STEPS rows; `Adapters.folds` is one of WAYS, which a server measures at its start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowq_cli.engine import steps as s
from lowq_cli.engine.lora_product import LoraProduct

SHRUNK = "shrunk"
NORMS, GATES = "norms", "gates"
WAYS = ("", GATES, NORMS)


@dataclass(frozen=True, eq=False)
class NormShrink(s.Step):
    """x += y, y = norm(x), and what the adapters add to `product` of y, before their second factors."""

    norm: s.AddNorm
    product: LoraProduct
    what = "norm"

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_folded import norm_shrink

        norm, y = self.norm.norm, None if self.norm.first else f.y
        assert norm.weight is not None
        f.x, f.y, f.kept[SHRUNK] = norm_shrink(f.x, y, norm.weight, norm.eps, self.product.factors, self.product.each(f))


@dataclass(frozen=True, eq=False)
class ShrunkProduct(s.Step):
    """y = layer(y), with what the step before has computed of the adapters' addition; without it if the next step adds it.

    shrinks: the step before has computed nothing of it, so this one does.
    """

    product: LoraProduct
    expands: bool = True
    shrinks: bool = False
    what = "product"

    def width(self, before: int) -> int:
        return self.product.width(before)

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_triton import expand_rows, shrink_rows

        x, factors, rows = f.y, self.product.factors, self.product.each(f)
        t = self.product.room(x) if self.shrinks else None
        f.y = self.product.product.layer.forward(x)
        if self.shrinks:
            f.kept[SHRUNK] = shrink_rows(x, factors, rows, t)
        if self.expands:
            expand_rows(f.y, f.kept.pop(SHRUNK), factors, rows)


@dataclass(frozen=True, eq=False)
class GateShrink(s.Step):
    """y += what the adapters add to `up`, y = act(gate) * up, and what they add to `down` of y, before their second factors.

    down: None if that product shrinks by itself.
    """

    gate: s.Gate
    up: LoraProduct
    down: LoraProduct | None = None
    what = "activation"

    def width(self, before: int) -> int:
        return self.gate.width(before)

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_folded import gate_shrink

        gate, down = self.gate, None if self.down is None else self.down.factors
        shrunk, how = f.kept.pop(SHRUNK), (gate.act, gate.gate_scale, self.up.each(f))
        f.y, behind = gate_shrink(f.y, shrunk, self.up.factors, down, *how)
        if behind is not None:
            f.kept[SHRUNK] = behind


def fold(steps: Sequence[s.Step], way: str) -> list[s.Step]:
    """The steps with neighbours of products with adapters folded. way: of WAYS."""
    return list(steps) if not way else _with_gates(steps) if way == GATES else _with_norms(steps)


def _with_gates(steps: Sequence[s.Step]) -> list[s.Step]:
    from lowq_kernels.decode.low_rank_folded import takes_gate

    made = list(steps)
    for i, step in enumerate(steps):
        match steps[i - 1] if i else None, step:
            case LoraProduct() as up, s.Gate(gated=True) as gate if takes_gate(up.factors, None, gate.act):
                made[i - 1 : i + 1] = ShrunkProduct(up, expands=False, shrinks=True), GateShrink(gate, up)
    return made


def _with_norms(steps: Sequence[s.Step]) -> list[s.Step]:
    from lowq_kernels.decode.low_rank_folded import takes_gate

    made, i = list[s.Step](), 0
    while i < len(steps):
        match steps[i : i + 4]:
            case [s.AddNorm(post=None) as norm, LoraProduct() as up, s.Gate(gated=True) as gate, LoraProduct() as down] if (
                takes_gate(up.factors, down.factors, gate.act)
            ):
                made += [
                    NormShrink(norm, up),
                    ShrunkProduct(up, expands=False),
                    GateShrink(gate, up, down),
                    ShrunkProduct(down),
                ]
                i += 4
            case [s.AddNorm(post=None) as norm, LoraProduct() as product, *_]:
                made += [NormShrink(norm, product), ShrunkProduct(product)]
                i += 2
            case _:
                made.append(steps[i])
                i += 1
    return made
