"""Stack: the packed weights of a mixture's experts in one tensor, so that one kernel can address each of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from lowq_kernels.dispatch.registry import matmul
from lowq_kernels.products.cpu import dense
from lowq_packers.layouts import PackedWeight, repack
from lowq_packers.scheme import Scheme

Facts = tuple[int, int, Scheme | None, str]  # N, K, scheme and layout of a Stack


@dataclass(frozen=True)
class Stack:
    """The weights (N, K) of several experts in one layout, experts along dim 0. scheme None: `words` (E, N, K) is dense."""

    words: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    aux: torch.Tensor | None
    scheme: Scheme | None
    N: int
    K: int
    layout: str
    table: torch.Tensor | None = None  # (E, T, width): each expert's
    bias: torch.Tensor | None = None  # (E, N): what kernels of a whole layer (op "experts") add; `product` does not

    @property
    def facts(self) -> Facts:
        """The facts that dispatch uses."""
        return self.N, self.K, self.scheme, self.layout

    def expert(self, e: int) -> PackedWeight:
        """Expert e's packed weight: views."""
        assert self.scheme is not None
        assert self.scales is not None
        zeros, aux, table = (None if t is None else t[e] for t in (self.zeros, self.aux, self.table))
        return PackedWeight(self.words[e], self.scales[e], zeros, self.scheme, self.N, self.K, self.layout, aux, table)

    def side_by_side(self) -> PackedWeight:
        """All experts' rows as one weight: views, for a layout in which experts are whole blocks of rows (tile)."""
        assert self.scheme is not None
        assert self.scales is not None
        tensors = (None if t is None else t.flatten(0, 1) for t in (self.words, self.scales, self.zeros, self.table))
        words, scales, zeros, table = tensors
        N = self.N * self.words.shape[0]
        return PackedWeight(words, scales, zeros, self.scheme, N, self.K, self.layout, table=table)  # type: ignore[arg-type]

    def product(self, x: torch.Tensor, e: int) -> torch.Tensor:
        """x (M, K) times expert e's weight -> (M, N)."""
        if self.scheme is None:
            return dense.product(x, self.words[e].to(x.dtype), None)
        return matmul(x, self.expert(e))

    def take(self, experts: torch.Tensor) -> "Stack":
        """Copies of the chosen experts, in their order."""
        fields = ("words", "scales", "zeros", "aux", "table", "bias")
        leaves: dict[str, Any] = {f: t[experts] for f in fields if (t := getattr(self, f)) is not None}
        return replace(self, **leaves)

    def repacked(self, layout: str) -> "Stack":
        """The same weights in another layout, expert by expert."""
        if layout == self.layout:
            return self
        moved = [repack(self.expert(e), layout) for e in range(self.words.shape[0])]
        fields = zip(*((p.words, p.scales, p.zeros, p.aux) for p in moved), strict=True)
        words, scales, zeros, aux = (None if f[0] is None else torch.stack(f) for f in fields)
        assert words is not None
        return replace(self, words=words, scales=scales, zeros=zeros, aux=aux, layout=layout)


@dataclass(frozen=True)
class Shared:
    """An expert that every token takes in addition to its own: its weights, and the weight (H,) of its gate or None.

    gate_up (2 I, H): rows of gate, then of up; (I, H) without a gate, like the others. down (H, I). Its output is multiplied
    by sigmoid(opening x).
    """

    gate_up: PackedWeight
    down: PackedWeight
    opening: torch.Tensor | None = None

    @property
    def facts(self) -> tuple[Facts, Facts]:
        """The facts that dispatch uses."""
        return tuple((p.N, p.K, p.scheme, p.layout) for p in (self.gate_up, self.down))  # type: ignore[return-value]
