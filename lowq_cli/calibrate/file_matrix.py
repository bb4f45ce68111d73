"""A matrix in the format of another tool's file, and better codes and scales in the same format.

Codes come from gptq on the present grid. Each scale then moves to the value that the format can hold and that gives the least
output error tr(E H E^T), with the weight error E and the inputs' second moments H. GGUF's blocks also start from scales that
are searched anew. The two steps alternate; the best result is kept, so that the error never grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from lowq_cli.plan.plan import Item
from lowq_cli.quantizers import gptq
from lowq_cli.quantizers._block_search import quantize_blocks
from lowq_cli.quantizers.gptq import Moments
from lowq_packers import tables
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, Blocks
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.tables import from_bytes

TINY = 1e-30  # replaces 0 in divisors


class Given(Protocol):
    """A matrix (N, K) in a file's own format."""

    def dequantize(self) -> torch.Tensor: ...

    def to(self, device: torch.device | str) -> Any: ...

    def starts(self, target: Target) -> list[Any]:
        """This matrix, and others in its format from which the improvement also starts."""

    def codes_for(self, W: torch.Tensor, moments: Moments) -> Any:
        """The same scales with gptq's codes for W."""

    def rescaled(self, target: Target) -> Any:
        """The same codes with better scales."""


Held = TypeVar("Held", bound=Given)


class GivenFile(Protocol):
    """A file of `Given` matrices, by checkpoint name."""

    def given(self, name: str) -> Given: ...

    def saved(self, name: str, given: Given) -> dict[str, torch.Tensor]:
        """The tensors to save for a matrix during a run."""

    def load(self, path: Path, item: Item) -> Given:
        """The matrix that was saved in a finished layer's file."""


def better(W: torch.Tensor, given: Held, moments: Moments) -> Held:
    """`given` for W (N, K), with new codes and scales where they lower the output's error."""
    target = Target(gptq.correct_drift(W, moments).float(), moments.second.float())
    best, least = given, target.error(given)

    def improve(made: Held) -> None:
        nonlocal best, least
        for step in (lambda g: g.codes_for(W, moments), lambda g: g.rescaled(target)):
            made = step(made)
            if (error := target.error(made)) < least:
                best, least = made, error

    for start in given.starts(target):
        improve(start)
    improve(best)
    return best


@dataclass(frozen=True)
class Target:
    """The target of a quantized matrix: W (N, K), and the second moments (K, K) of its inputs."""

    W: torch.Tensor
    second: torch.Tensor

    def error(self, given: Given) -> float:
        """tr(E H E^T)."""
        off = self.W - given.dequantize()
        return float(((off @ self.second) * off).sum())


class _Residual:
    """E = W - Q and E H, both (N, K), kept up to date while columns of Q change."""

    def __init__(self, target: Target, Q: torch.Tensor) -> None:
        self.H, self.E = target.second, target.W - Q
        self.G = self.E @ self.H

    def costs(
        self, part: slice, directions: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[tuple[int, int], torch.Tensor]]:
        """For directions (N, columns) in which Q may move: the gain (N,) per step along each, and the cost (N,) per pair."""
        H = self.H[part, part]
        gains = [torch.linalg.vecdot(self.G[:, part], d) for d in directions]
        bent = [d @ H for d in directions]
        both = {(i, j): torch.linalg.vecdot(bent[i], directions[j]) for i in range(len(bent)) for j in range(i, len(bent))}
        return gains, both

    def move(self, part: slice, by: torch.Tensor) -> None:
        """Q[:, part] += by."""
        self.E[:, part] -= by
        self.G.addmm_(by, self.H[part], alpha=-1)


@dataclass(frozen=True)
class GivenCodes:
    """Codes, scales and zeros in lowq's form. Scales of schemes with float zeros do not change."""

    q: QuantizedTensor

    def dequantize(self) -> torch.Tensor:
        """(N, K) fp32."""
        return self.q.dequantize()

    def to(self, device: torch.device | str) -> GivenCodes:
        """The same on another device."""
        return GivenCodes(self.q.to(device))

    def starts(self, target: Target) -> list[GivenCodes]:
        """As `Given` says."""
        return [self]

    def codes_for(self, W: torch.Tensor, moments: Moments) -> GivenCodes:
        """As `Given` says."""
        return GivenCodes(gptq.quantize(W, self.q.scheme, None, moments, self.q))

    def rescaled(self, target: Target) -> GivenCodes:
        """As `Given` says."""
        s, q = self.q.scheme, self.q
        if s.zero == "float":
            return self
        held = replace_scales(q, torch.ones_like(q.scales) if s.scale == "float" else _ones(q))
        ones = held.dequantize() / held.wide_scales.repeat_interleave(s.group_size, 1)
        stored, wide, moving = q.scales.clone(), q.wide_scales, _Residual(target, q.dequantize())
        for g in range(wide.shape[1]):
            part = slice(g * s.group_size, (g + 1) * s.group_size)
            (gain,), both = moving.costs(part, [ones[:, part]])
            best = wide[:, g] + gain / both[0, 0].clamp(min=TINY)
            new, now = self._nearest(stored[:, g : g + 1], wide[:, g], best)
            step = now - wide[:, g]
            helps = step * (step * both[0, 0] - 2 * gain) < 0
            stored[:, g] = torch.where(helps, new, stored[:, g])
            moving.move(part, torch.where(helps, step, 0.0).unsqueeze(-1) * ones[:, part])
        return GivenCodes(replace_scales(q, stored))

    def _nearest(self, old: torch.Tensor, wide: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored form and the value of the scales (N,) nearest to `wanted`; those in bytes keep their sign."""
        kind = self.q.scheme.scale
        if kind == "float":
            new = wanted.to(_narrowest(self.q.scales)).to(old.dtype)
            sound = new.isfinite() & (new * old[:, 0] > 0)
            new = torch.where(sound, new, old[:, 0])
            return new, new.float()
        factor = 1.0 if self.q.table is None or self.q.scheme.table == "fitted" else self.q.table.flatten()
        sign = torch.where(wide < 0, -1.0, 1.0)
        new = tables.to_bytes(((wanted * sign).clamp(min=TINY) * sign / factor).unsqueeze(-1), kind)[:, 0]
        return new, from_bytes(new, kind) * factor


def _ones(q: QuantizedTensor) -> torch.Tensor:
    """The scale 1 as the scheme stores it, in bytes."""
    return tables.to_bytes(torch.ones(q.scales.shape, device=q.scales.device), q.scheme.scale)


def replace_scales(q: QuantizedTensor, scales: torch.Tensor) -> QuantizedTensor:
    """The same codes and zeros with other scales."""
    return QuantizedTensor.of(q.scheme, q.W_q, scales, q.zeros, q.table)


def _narrowest(scales: torch.Tensor) -> torch.dtype:
    """The dtype with the fewest bits that holds all of these scales exactly: the dtype of the file they were read from."""
    for dtype in (torch.bfloat16, torch.float16) if scales.dtype == torch.float32 else ():
        if torch.equal(scales.to(dtype).float(), scales.float()):
            return dtype
    return scales.dtype


@dataclass(frozen=True)
class GivenBlocks:
    """GGUF's blocks of two levels."""

    blocks: Blocks

    def dequantize(self) -> torch.Tensor:
        """(N, K) fp32."""
        return self.blocks.dequantize()

    def to(self, device: torch.device | str) -> GivenBlocks:
        """The same on another device."""
        return GivenBlocks(self.blocks.each(lambda t: t.to(device)))

    def starts(self, target: Target) -> list[GivenBlocks]:
        """As in `Given`: also blocks searched anew, with squared errors weighted by the root mean square of a column's inputs.

        Four matrices of the demo, Q2_K to Q6_K searched without weights: the improved output error is 0 to 5% less than from
        these blocks alone (mean 1.6%).
        """
        powers = target.second.diagonal().sqrt()
        weights = powers.clamp(min=1e-3 * float(powers.mean()) + TINY)
        return [self, GivenBlocks(quantize_blocks(target.W, self.blocks.kind, weights))]

    def codes_for(self, W: torch.Tensor, moments: Moments) -> GivenBlocks:
        """As `Given` says."""
        b = BLOCK_KINDS[self.blocks.kind]
        values, order = b.values(W.device).sort()
        steps, lows = self.blocks.steps, self.blocks.lows
        lows = torch.zeros_like(steps) if lows is None else lows
        between = (values[1:] + values[:-1]) / 2

        def nearest_in(group: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
            step, low = steps[:, group], lows[:, group]
            inverse = torch.where(step == 0, 0.0, 1 / torch.where(step == 0, 1.0, step))

            def nearest(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                places = torch.bucketize((column + low) * inverse, between)
                return order[places].float(), values[places] * step - low

            return nearest

        codes = gptq.codes_on(W, moments, b.sub, nearest_in)
        return GivenBlocks(replace(self.blocks, codes=codes))

    def rescaled(self, target: Target) -> GivenBlocks:
        """Better scales: the integers of sub-blocks move by at most one, then d and dmin of super-blocks are refitted."""
        q = replace(self.blocks, s=self.blocks.s.clone(), m=None if self.blocks.m is None else self.blocks.m.clone())
        moving = _Residual(target, q.dequantize())
        if BLOCK_KINDS[q.kind].read_scales:
            _move_whole(q, moving)
        d, dmin = q.d.clone(), None if q.dmin is None else q.dmin.clone()
        _move_halves(q, d, dmin, moving)
        return GivenBlocks(replace(q, d=d, dmin=dmin))


def _move_whole(q: Blocks, moving: _Residual) -> None:
    """Move the integers s and m (N, K / sub) by at most one where that lowers the error, in place."""
    b = BLOCK_KINDS[q.kind]
    each, values = q.s.shape[1] // q.d.shape[1], q.values
    for g in range(q.s.shape[1]):
        part = slice(g * b.sub, (g + 1) * b.sub)
        d = q.d[:, g // each].float().unsqueeze(-1)
        up = d * values[:, part]
        down = [] if q.dmin is None else [-q.dmin[:, g // each].float().unsqueeze(-1).expand_as(up)]
        gains, both = moving.costs(part, [up, *down])
        s, m = q.s[:, g].float(), None if q.m is None else q.m[:, g].float()
        best, best_s, best_m = torch.zeros_like(s), torch.zeros_like(s), torch.zeros_like(s)
        for ds in (-1, 0, 1):
            a = (s + ds).clamp(*b.scales) - s
            for dm in (-1, 0, 1) if m is not None else (0,):
                cost = a * (a * both[0, 0] - 2 * gains[0])
                c = torch.zeros_like(s)
                if m is not None:
                    c = (m + dm).clamp(0, b.mins) - m
                    cost = cost + c * (c * both[1, 1] - 2 * gains[1] + 2 * a * both[0, 1])
                less = cost < best
                best, best_s, best_m = torch.where(less, cost, best), torch.where(less, a, best_s), torch.where(less, c, best_m)
        q.s[:, g] += best_s.to(q.s.dtype)
        by = best_s.unsqueeze(-1) * up
        if q.m is not None:
            q.m[:, g] += best_m.to(q.m.dtype)
            by = by + best_m.unsqueeze(-1) * down[0]
        moving.move(part, by)


def _move_halves(q: Blocks, d: torch.Tensor, dmin: torch.Tensor | None, moving: _Residual) -> None:
    """Refit d and dmin (N, K / elements) by least squares, in place, where the fit is still better once rounded to fp16."""
    b = BLOCK_KINDS[q.kind]
    each = b.elements // b.sub
    for i in range(d.shape[1]):
        part, subs = slice(i * b.elements, (i + 1) * b.elements), slice(i * each, (i + 1) * each)
        up = q.s[:, subs].float().repeat_interleave(b.sub, 1) * q.values[:, part]
        down = [] if q.m is None else [-q.m[:, subs].float().repeat_interleave(b.sub, 1)]
        gains, both = moving.costs(part, [up, *down])
        aa = both[0, 0].clamp(min=TINY)
        x, y = gains[0] / aa, torch.zeros_like(gains[0])
        if down:
            det = aa * both[1, 1] - both[0, 1].square()
            sound = det > 1e-6 * aa * both[1, 1]
            det = torch.where(sound, det, 1.0)
            x = torch.where(sound, (gains[0] * both[1, 1] - gains[1] * both[0, 1]) / det, x)
            y = torch.where(sound, (gains[1] * aa - gains[0] * both[0, 1]) / det, y)
        new = (d[:, i].float() + x).half()
        a = new.float() - d[:, i].float()
        cost = a * (a * both[0, 0] - 2 * gains[0])
        c, low = y, None
        if down:
            assert dmin is not None
            low = (dmin[:, i].float() + y).half()
            low = low if b.read_scales is None else low.clamp(min=0)
            c = low.float() - dmin[:, i].float()
            cost = cost + c * (c * both[1, 1] - 2 * gains[1] + 2 * a * both[0, 1])
        less = (cost < 0) & cost.isfinite()
        d[:, i] = torch.where(less, new, d[:, i])
        by = torch.where(less, a, 0.0).unsqueeze(-1) * up
        if down:
            assert dmin is not None
            assert low is not None
            dmin[:, i] = torch.where(less, low, dmin[:, i])
            by = by + torch.where(less, c, 0.0).unsqueeze(-1) * down[0]
        moving.move(part, by)
