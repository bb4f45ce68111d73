"""Steps with LoRA adapters in which the gate's kernel also adds what the adapters add to gate and up.

A layer then takes seven launches for its adapters instead of eight, four of which run beside products. For up to STEPS rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lowq_cli.engine import steps as s
from lowq_cli.engine.lora_product import LoraProduct

SHRUNK = "shrunk"


@dataclass(frozen=True, eq=False)
class ShrunkProduct(s.Step):
    """y = layer(y), and what the adapters add, before their second factors."""

    product: LoraProduct
    what = "product"

    def width(self, before: int) -> int:
        return self.product.width(before)

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_triton import room, shrink_rows

        x, factors, rows = f.y, self.product.factors, self.product.each(f)
        t = room(x, factors)
        f.y = self.product.product.layer.forward(x)
        f.kept[SHRUNK] = shrink_rows(x, factors, rows, t)


@dataclass(frozen=True, eq=False)
class AddedGate(s.Step):
    """y += what the adapters add to `up`, y = act(gate) * up."""

    gate: s.Gate
    up: LoraProduct
    what = "activation"

    def width(self, before: int) -> int:
        return self.gate.width(before)

    def run(self, f: s.Frame) -> None:
        from lowq_kernels.decode.low_rank_gate import gate_rows

        gate, up = self.gate, self.up
        f.y = gate_rows(f.y, f.kept.pop(SHRUNK), up.factors, gate.act, gate.gate_scale, up.each(f))


def fold(steps: Sequence[s.Step]) -> list[s.Step]:
    """The steps with gates and the products before them folded."""
    from lowq_kernels.decode.low_rank_gate import takes_gate

    made = list(steps)
    for i in range(len(steps) - 1):
        match steps[i : i + 2]:
            case [LoraProduct() as up, s.Gate(gated=True) as gate] if takes_gate(up.factors, gate.act):
                made[i : i + 2] = ShrunkProduct(up), AddedGate(gate, up)
    return made
