"""A product with the LoRA adapters of its rows, and what a plan knows of its adapters."""

from dataclasses import dataclass, field

import torch

from lowq_cli.engine import steps as s
from lowq_kernels.decode.low_rank import add_low_rank, room
from lowq_kernels.decode.low_rank_factors import LowRank
from lowq_kernels.lasting import kept


@dataclass
class Adapters:
    """A plan's adapters. names: in order of their numbers, from 1 on. all: the adapter number of rows that do not state one."""

    names: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    all: int = 0
    _same: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # kept because recorded steps read them

    def of_all(self, rows: int, device: torch.device) -> torch.Tensor:
        """The adapter numbers of rows that do not state one, (rows,) int32."""
        return kept(self._same, (self.all, rows), lambda: torch.full((rows,), self.all, dtype=torch.int32, device=device))


@dataclass(frozen=True, eq=False)
class LoraProduct(s.Step):
    """y = layer(y) + the low-rank term of each row's adapter; adapter 0 adds nothing."""

    product: s.Product
    factors: LowRank
    adapters: Adapters
    what = "product"

    @property
    def base(self) -> s.Step:
        return self.product

    def width(self, before: int) -> int:
        return self.product.width(before)

    def rows(self, f: s.Frame) -> torch.Tensor | None:
        """The adapter of each row, or None where no row has one."""
        if f.batch.adapters is None and self.adapters.all:
            return self.adapters.of_all(f.x.shape[0], f.x.device)
        return f.batch.adapters

    def each(self, f: s.Frame) -> torch.Tensor:
        """The adapter of each row, in a pass in which some row has one."""
        rows = self.rows(f)
        assert rows is not None
        return rows

    def run(self, f: s.Frame) -> None:
        x, rows = f.y, self.rows(f)
        t = None if rows is None else room(x, self.factors)
        f.y = self.product.layer.forward(x)  # without the hooks that add the adapter in a transformers model's forward
        if rows is not None:
            add_low_rank(f.y, x, self.factors, rows, t)
