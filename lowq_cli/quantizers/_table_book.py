"""Sorted tables: nearest values of weights, and the scales with the least error."""

from functools import cache, cached_property, partial
from typing import Any

import torch

from lowq_cli.quantizers._slabs import smallest_scale, store_scales
from lowq_kernels.gptq.round_block import carry
from lowq_kernels.optional import optional
from lowq_packers.scheme import Scheme
from lowq_packers.tables import SIGN, from_bytes, signed, to_bytes, values

# Starts of the search for a float scale, as shares of the scale that reaches the group's largest weight. REFINE fits to the
# resulting codes follow each start.
SHARES = (1.0, 0.85, 0.7)
REFINE = 2
# Byte scales that are tried, in steps from the scale that reaches the group's largest weight; e4m3 has 8 steps per octave.
# Base, relative error in NVFP4: 0.0951 with that scale alone, 0.0878 with starts and fits as for float scales, 0.0886 with that
# scale and one 1.5 times as large ("four over six"), 0.0815 with -2 .. 5, 0.0812 with these and with -5 .. 8.
TRIED = {"e4m3": range(-3, 8), "e8m0": range(-1, 2)}
# Those of e4m3 for tables of four values. Base, relative squared error in groups of 16 and 32: 0.0807 and 0.0996 from -3 on,
# 0.0796 and 0.0955 with these.
TRIED_BY_FOUR = range(-9, 8)
LEAST, LAST = {"e4m3": 1, "e8m0": 0}, {"e4m3": 0x7E, "e8m0": 0xFE}  # bytes of the smallest and the largest scale
TINY = 1e-30  # replaces the scale 0 of an all-zero group


def divisor(scales: torch.Tensor) -> torch.Tensor:
    """Scales of any sign, none of them nearer to 0 than TINY."""
    return scales.abs().clamp(min=TINY).copysign(scales)


@cache
def implementation(device: str) -> Any:
    """The module of the kernel that searches scales on a device of this type; None: torch does it."""
    return optional("lowq_kernels.gptq.fit_scales_triton", "triton") if device == "cuda" else None


@cache
def rounding(device: str) -> Any:
    """The module of the kernel that rounds a block of columns; None: torch does it."""
    return optional("lowq_kernels.gptq.round_block_triton", "triton") if device == "cuda" else None


class Book:
    """A sorted table, with the scales that a scheme can store.

    mirrored: scales of both signs are tried, as negative ones mirror the table; None: where the scheme can store them.
    """

    def __init__(
        self,
        scheme: Scheme,
        companion: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype | None,
        mirrored: bool | None = None,
    ) -> None:
        self.scheme, self.dtype = scheme, dtype
        self.mirrored = signed(scheme) if mirrored is None else mirrored
        self.factor = 1.0 if companion is None or scheme.table == "fitted" else companion
        table = values(scheme, companion, device)[0]
        ordered, order = table.sort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]  # keeps +0 of e2m1's two zeros
        self.values, self.codes = ordered[first], order[first]
        self.between = (self.values[1:] + self.values[:-1]) / 2
        self.most = float(table.abs().max())

    def store(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positive scales (N, G) in the scheme's stored form, and their values in fp32."""
        kind = self.scheme.scale
        if kind == "float":
            stored = store_scales(scales, self.dtype)
            return stored, stored
        stored = to_bytes(scales / self.factor, kind)
        return stored, self.wide(stored)

    def wide(self, stored: torch.Tensor) -> torch.Tensor:
        """The values of stored scales in fp32."""
        return stored if self.scheme.scale == "float" else from_bytes(stored, self.scheme.scale) * self.factor

    def start(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales (N, G) that reach the largest weight of groups (N, G, g); for e8m0 from exponents, as in the OCP standard."""
        stored, wide = self._reaching(groups)
        if not self.mirrored:
            return stored, wide
        high, low = self.values[-1] + self.values[0] >= 0, groups.amax(-1) + groups.amin(-1) < 0  # the farther ends
        return self._negated(stored, wide, low == high)

    def _negated(self, stored: torch.Tensor, wide: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and their values, negative where asked."""
        wide = torch.where(where, -wide, wide)
        return wide if self.scheme.scale == "float" else torch.where(where, stored | SIGN, stored), wide

    def _reaching(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The magnitudes of `start`."""
        top = groups.abs().amax(-1)
        if self.scheme.scale == "e8m0":  # OCP Microscaling Formats 1.0, section 6.3
            exponents = torch.frexp(top)[1] - torch.frexp(torch.tensor(self.most))[1]
            return self.store(torch.ldexp(torch.ones_like(top), torch.where(top > 0, exponents, -127)))
        return self.store(top / self.most)

    def places(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The index in the sorted table of the value nearest to each weight of groups (N, G, g)."""
        return torch.bucketize(groups / divisor(scales).unsqueeze(-1), self.between)

    def nearest(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Codes (R, G, g) for scales (R, G)."""
        return self.codes[self.places(groups, scales)]

    def nearest_of(self, scales: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of a column (R,) for scales (R,), and their values."""
        places = self.places(column.unsqueeze(-1), scales).squeeze(-1)
        return self.codes[places], self.values[places] * scales

    def round_block(self, block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As kernels/gptq/round_block.py's `round_block`, for scales (R,): one launch on CUDA, elsewhere 12 per column."""
        if kernel := rounding(block.device.type):
            return kernel.round_by_table_triton(block, factor, scales, self.values, self.codes, TINY)
        return carry(block, factor, partial(self.nearest_of, scales))

    def search(self, groups: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and stored scales with the least squared error among those that are tried.

        weights: (g,) or (G, g) positive weights of the squared errors within a group; None weighs all equally.
        On CUDA this is one launch of kernels/gptq/fit_scales_triton.py if Triton is installed and it takes the group size;
        elsewhere torch, 116 to 784 small ops. Their sums differ by fp32 rounding.
        """
        if kernel := self._kernel(groups):
            stored, _, codes = kernel.fit_scales_triton(groups, weights, self._constants)
            return codes, stored
        return self.search_torch(groups, weights)

    def scales(self, groups: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored scales of `search`, and their values in fp32."""
        if kernel := self._kernel(groups):
            return kernel.fit_scales_triton(groups, weights, self._constants)[:2]
        stored = self.search_torch(groups, weights)[1]
        return stored, self.wide(stored)

    def _kernel(self, groups: torch.Tensor) -> Any:
        """The kernel's module, if it takes these groups."""
        kernel = implementation(groups.device.type)
        return kernel if kernel and groups.shape[-1] <= kernel.MOST else None

    @cached_property
    def _constants(self) -> Any:
        """The kernel's `Search`."""
        kind = self.scheme.scale
        factor = None if isinstance(self.factor, float) else self.factor
        dtype = self.dtype if kind == "float" else None  # bytes are the same for each dtype, so the kernel is compiled once
        limits = LEAST.get(kind, 0), LAST.get(kind, 0)
        constants = SHARES, REFINE + 1, self._tried, limits, smallest_scale(dtype), TINY, SIGN
        table = self.values, self.codes, factor, kind, dtype, self.mirrored
        return implementation(self.values.device.type).Search(*table, *constants)

    @property
    def _tried(self) -> range:
        """Steps from the first byte scale to those that are tried."""
        if self.scheme.scale == "e4m3" and self.scheme.bits == 2:
            return TRIED_BY_FOUR
        return TRIED.get(self.scheme.scale, range(0))

    def search_torch(self, groups: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`search` on any device."""
        found = self._positive(groups, weights)
        if not self.mirrored:
            return found.codes, found.stored
        other = self._positive(-groups, weights)
        better = other.loss < found.loss
        stored = torch.where(better, other.stored, found.stored)
        codes = torch.where(better.unsqueeze(-1), other.codes, found.codes)
        return codes, self._negated(stored, self.wide(stored), better)[0]

    def _positive(self, groups: torch.Tensor, weights: torch.Tensor | None) -> "_Best":
        """The same among positive scales."""
        stored, first = self._reaching(groups)
        best = _Best(self, groups, weights, stored)
        if self.scheme.scale != "float":
            least, last = LEAST[self.scheme.scale], LAST[self.scheme.scale]
            for steps in self._tried:
                now = (stored.int() + steps).clamp(least, last).to(torch.uint8)
                best.consider(now, self.wide(now))
            return best
        for share in SHARES:
            now, wide = self.store(first * share)
            for _ in range(REFINE + 1):
                q = best.consider(now, wide)
                along = torch.linalg.vecdot(best.weighted, q)
                spread = torch.linalg.vecdot(q if weights is None else q * weights, q)
                now, wide = self.store(torch.where((along > 0) & (spread > 0), along / spread, wide))
        return best


class _Best:
    """The codes and stored scales of groups (N, G, g) with the least squared error so far."""

    def __init__(self, book: Book, groups: torch.Tensor, weights: torch.Tensor | None, stored: torch.Tensor) -> None:
        self.book, self.groups, self.weights, self.stored = book, groups, weights, stored
        self.weighted = groups if weights is None else groups * weights
        self.codes = torch.zeros(groups.shape, dtype=book.codes.dtype, device=groups.device)
        self.loss = torch.full(stored.shape, torch.inf, device=groups.device)

    def consider(self, stored: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """The nearest table values for these scales (N, G); codes and scales are kept where they lower the error."""
        places = self.book.places(self.groups, wide)
        q = self.book.values[places]
        loss = (self.groups - q * wide.unsqueeze(-1)).square_()
        loss = (loss if self.weights is None else loss * self.weights).sum(-1)
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        self.stored = torch.where(better, stored, self.stored)
        self.codes = torch.where(better.unsqueeze(-1), self.book.codes[places], self.codes)
        return q
