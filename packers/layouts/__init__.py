"""Memory layouts: the place of each code of an (N, K) weight. One file per layout; each calls `register`.

A kernel names the layouts it reads; a weight is in one layout at a time. Files are written in `rowstream`, or on request in
`tile` or `cpu`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from lowq_packers.errors import SchemeError
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme


def pack_facts(scheme: Scheme | None, N: int, K: int, layout: str) -> str:
    """Scheme (None: dense), sizes and layout of a weight in one string: "4 128 float 4096 4096 tile"."""
    s = "0 0 none" if scheme is None else f"{scheme.bits} {scheme.group_size} {scheme.kind}"
    return f"{s} {N} {K} {layout}"


@cache
def read_facts(facts: str) -> tuple[Scheme | None, int, int, str]:
    """Inverse of `pack_facts`."""
    bits, group_size, kind, N, K, layout = facts.split()
    scheme = None if bits == "0" else Scheme.of(int(bits), int(group_size), kind)
    return scheme, int(N), int(K), layout


@dataclass(frozen=True)
class PackedWeight:
    """An (N, K) weight in one layout: `words`, `scales`, `zeros` (None for the zero kind "none"), shaped as the layout says.

    `aux` is what a layout precomputes from those three; it is never written to disk. `table` is a QuantizedTensor's, the same
    in every layout.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    scheme: Scheme
    N: int
    K: int
    layout: str
    aux: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.table is not None) != bool(self.scheme.table_width):
            raise SchemeError(
                f"a weight of {self.scheme} has {'no' if self.table is None else 'a stray'} table next to its scales"
            )

    @property
    def facts(self) -> str:
        """Facts that the tensors do not contain, as a string for torch's custom ops; `from_facts` reads it."""
        return pack_facts(self.scheme, self.N, self.K, self.layout)

    @classmethod
    def from_facts(
        cls,
        words: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        aux: torch.Tensor | None,
        facts: str,
        table: torch.Tensor | None = None,
    ) -> PackedWeight:
        """The weight of these tensors."""
        scheme, N, K, layout = read_facts(facts)
        assert scheme is not None
        return cls(words, scales, zeros, scheme, N, K, layout, aux, table)

    @property
    def nbytes(self) -> int:
        """Bytes held by all of its tensors."""
        tensors = (self.words, self.scales, self.zeros, self.aux, self.table)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True)
class Layout:
    """One layout. `why_not(scheme, N, K)` returns why it cannot hold such a weight, or None.

    Layouts that only differ from rowstream by a cheap move set `from_rowstream`, which skips the one-byte-per-code detour.
    Layouts that files may hold say the `shapes` of words and of scales (and zeros) for a scheme, N and K; in files N is a
    multiple of `row_step`, and rows are packed in slabs of so many. `device`: the only kind of device that can pack it.
    `words`: the dtype of words. `rows(weight, numbers)` returns codes (n, K), scales and zeros (n, groups) of the rows
    (n,) int64, without waiting for the device; layouts without it hold no embeddings.
    """

    name: str
    pack: Callable[[QuantizedTensor], PackedWeight]
    unpack: Callable[[PackedWeight], QuantizedTensor]
    why_not: Callable[[Scheme, int, int], str | None] = lambda scheme, N, K: None
    from_rowstream: Callable[[PackedWeight], PackedWeight] | None = None
    shapes: Callable[[Scheme, int, int], tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    row_step: int = 1
    device: str | None = None
    words: str = "int32"
    rows: Callable[[PackedWeight, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] | None = None


LAYOUTS: dict[str, Layout] = {}
ALONE: dict[str, Layout] = {}  # each the only one of a kind of weight, which it alone can hold
DISK = "rowstream"  # the default layout of files


def register(layout: Layout) -> Layout:
    """Register a layout by its name. Raises SchemeError on a second registration."""
    if layout.name in LAYOUTS:
        raise SchemeError(f"layout {layout.name!r} is registered twice")
    LAYOUTS[layout.name] = layout
    return layout


def get(name: str) -> Layout:
    """The layout of that name. Raises SchemeError that lists the existing ones."""
    layout = LAYOUTS.get(name) or ALONE.get(name)
    if layout is None:
        raise SchemeError(f"layout {name!r} does not exist; use one of {', '.join(sorted(LAYOUTS))}")
    return layout


def stored(name: str) -> Layout:
    """The layout of that name, if files may have it. Raises SchemeError that lists those of files."""
    layout = LAYOUTS.get(name)
    if layout is None or layout.shapes is None:
        names = ", ".join(sorted(k for k, v in LAYOUTS.items() if v.shapes))
        raise SchemeError(f"files cannot have the layout {name!r}; use one of {names}")
    return layout


def pack(q: QuantizedTensor, layout: str = DISK) -> PackedWeight:
    """Convert a quantized tensor to a layout. Raises SchemeError if the layout cannot hold it."""
    chosen, alone = get(layout), q.scheme.block_rows > 1 and layout not in ALONE
    if reason := "it holds no 8-bit floats" if alone else chosen.why_not(q.scheme, *q.shape):
        raise SchemeError(f"layout {layout} cannot hold a {q.shape[0]}x{q.shape[1]} {q.scheme} weight: {reason}")
    return chosen.pack(q)


def unpack(p: PackedWeight) -> QuantizedTensor:
    """Inverse of `pack`, bit for bit (scales and zeros too)."""
    return get(p.layout).unpack(p)


def repack(p: PackedWeight, layout: str) -> PackedWeight:
    """The same weight in another layout."""
    if p.layout == layout:
        return p
    target = get(layout)
    if p.layout == DISK and target.from_rowstream and not target.why_not(p.scheme, p.N, p.K):
        return target.from_rowstream(p)
    return pack(unpack(p), layout)


def meta_rows(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """scales and zeros as (N, K // group_size), contiguous, since kernels get an address and no strides."""
    return q.scales.contiguous(), None if q.zeros is None else q.zeros.contiguous()


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
