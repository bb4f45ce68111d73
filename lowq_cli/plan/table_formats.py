"""`quantize --format`: formats whose values come from a table, as schemes of lowq's own."""

from dataclasses import dataclass

from lowq_packers.scheme import TABLES, ScaleKind, Scheme


@dataclass(frozen=True)
class TableFormat:
    """The table and scales of weights; `group` is the default group size, and the only one if `fixed`.

    groups: those that a budget of bits chooses from; a format without any has no budget.
    """

    table: str
    scale: ScaleKind
    group: int
    fixed: bool
    groups: tuple[int, ...] = ()

    @property
    def bits(self) -> tuple[int, ...]:
        """The widths of its codes."""
        return TABLES[self.table]

    def scheme(self, bits: int, group: int) -> Scheme:
        """The scheme of a width and group size. Raises SchemeError for one that does not exist."""
        return Scheme(bits, group, "none", self.table, self.scale)


TABLE_FORMATS = {
    "nvfp4": TableFormat("e2m1", "e4m3", 16, True),
    "mxfp4": TableFormat("e2m1", "e8m0", 32, True),
    "nf4": TableFormat("nf4", "float", 64, False),
    "table": TableFormat("fitted", "float", 64, False, (32, 64, 128)),
    "table-e4m3": TableFormat("fitted", "e4m3", 32, False, (16, 32, 64)),
}
# What `distill` stores weights in where a budget places the bits and nothing else is asked for. Base, --bpw 2.5 and 3.5, KL on
# WikiText-2: 0.257 and 0.0747; grids with float zeros 0.342 and 0.1234 (own text, 524,288 tokens; docs/accuracy.md).
PLACED = "table-e4m3"
