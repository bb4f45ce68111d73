"""Steps with LoRA adapters whose low-rank additions are part of the norms and gates next to their products.

    norm, product                  norm and shrink, product and expand
    norm, product, gate, product   norm and shrink, product, expand and gate and shrink, product and expand

A layer then takes four launches for its adapters instead of eight. For up to STEPS rows; `Adapters.folds` says whether.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowq_cli.engine import steps as s
from lowq_cli.engine.lora_product import LoraProduct

SHRUNK = "shrunk"


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
    """y = layer(y), with what the step before has computed of the adapters' addition; without it if the next step adds it."""

    product: LoraProduct
    expands: bool = True
    what = "product"

    def width(self, before: int) -> int:
        return self.product.width(before)

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_triton import expand_rows

        f.y = self.product.product.layer.forward(f.y)
        if self.expands:
            expand_rows(f.y, f.kept.pop(SHRUNK), self.product.factors, self.product.each(f))


@dataclass(frozen=True, eq=False)
class GateShrink(s.Step):
    """y += what the adapters add to `up`, y = act(gate) * up, and what they add to `down` of y, before their second factors."""

    gate: s.Gate
    up: LoraProduct
    down: LoraProduct
    what = "activation"

    def width(self, before: int) -> int:
        return self.gate.width(before)

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_folded import gate_shrink

        gate, factors = self.gate, (self.up.factors, self.down.factors)
        f.y, f.kept[SHRUNK] = gate_shrink(f.y, f.kept.pop(SHRUNK), *factors, gate.act, gate.gate_scale, self.up.each(f))


def fold(steps: Sequence[s.Step]) -> list[s.Step]:
    """The steps with neighbours of products with adapters folded."""
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
