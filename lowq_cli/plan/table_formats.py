"""`quantize --format`: formats whose values come from a table, as schemes of lowq's own."""

from dataclasses import dataclass

from lowq_packers.scheme import TABLES, ScaleKind, Scheme


@dataclass(frozen=True)
class TableFormat:
    """The table and scales of weights; `group` is the default, and the only one where it is `fixed`."""

    table: str
    scale: ScaleKind
    group: int
    fixed: bool

    @property
    def bits(self) -> tuple[int, ...]:
        """Widths that it has."""
        return TABLES[self.table]

    def scheme(self, bits: int, group: int) -> Scheme:
        """Raises SchemeError for a width or group that does not exist."""
        return Scheme(bits, group, "none", self.table, self.scale)


TABLE_FORMATS = {
    "nvfp4": TableFormat("e2m1", "e4m3", 16, True),
    "mxfp4": TableFormat("e2m1", "e8m0", 32, True),
    "nf4": TableFormat("nf4", "float", 64, False),
    "table": TableFormat("fitted", "float", 64, False),
}
