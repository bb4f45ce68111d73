"""GGUF's blocks of two levels (K-quants and their kin), searched for the least squared error.

Each sub-block first gets its best step and low from several starts, each refitted to its nearest codes. They are rounded to
integers times the super-block's d and dmin. Then integers, d and dmin, and codes are improved in turn, and the best result of
all is kept. llama.cpp's search ends with the rounding; this one continues from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from lowq_cli.quantizers._slabs import SLAB
from lowq_packers.errors import DamagedError, SchemeError
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS, BlockKind, Blocks

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # shares of a sub-block's range, the starts of its search
CUTS = (0.5, 0.0, 1.0)  # share of the omitted range that is omitted at the lower end
REFITS = 3  # refits of step and low to the codes of each start
ROUNDS = 3  # rounds of improving integers, d and dmin
TINY = 1e-30  # replaces the step of a sub-block of zeros
HALF_MAX = 65504.0  # the largest number of fp16
REACH = 128  # max. magnitude of a table's values


def quantize_blocks(W: torch.Tensor, kind: str, importance: torch.Tensor | None = None) -> Blocks:
    """W (N, K) in the type `kind`, with the least squared error that the search finds.

    importance: (K,) positive weights of the columns' squared errors; None weighs all columns equally.
    Raises SchemeError: K is not whole blocks, or fp16's scales do not reach a weight. DamagedError: NaN or infinite weights.
    """
    b = BLOCK_KINDS[kind]
    N, K = W.shape
    if K % b.elements:
        raise SchemeError(f"K={K} is not whole blocks of {kind}, which are {b.elements} long")
    rows = max(1, SLAB.get(W.device.type, SLAB["cpu"]) // K)
    parts = [_rows(W[i : i + rows].float(), kind, b, importance) for i in range(0, N, rows)]
    if len(parts) == 1:
        return parts[0]
    joined = [None if parts[0].m is None and f in ("m", "dmin") else torch.cat([getattr(p, f) for p in parts])
              for f in ("codes", "s", "m", "d", "dmin")]  # fmt: skip
    return Blocks(kind, *joined)  # type: ignore[arg-type]


def _rows(W: torch.Tensor, kind: str, b: BlockKind, importance: torch.Tensor | None) -> Blocks:
    if bad := int((~torch.isfinite(W)).sum()):
        raise DamagedError(f"the weight holds {bad} NaN or infinite values; the model file is damaged")
    n, subs = W.shape[0], b.elements // b.sub
    x = W.reshape(-1, subs, b.sub)  # one super-block per row
    weights = torch.ones_like(x[:1]) if importance is None else importance.float().to(W.device).reshape(-1, subs, b.sub)
    if importance is not None:
        weights = weights.repeat(n, 1, 1) if len(weights) > 1 else weights
    search = _Search(b, x, weights)
    numbers = search.best(search.start())
    s, m, d, dmin, whole = numbers.s, numbers.m, numbers.d, numbers.dmin, torch.int16
    codes = search.nearest(d * s, dmin * m)
    return Blocks(
        kind,
        codes.to(torch.uint8).reshape(n, -1),
        s.to(whole).reshape(n, -1),
        m.to(whole).reshape(n, -1) if b.mins else None,
        d.half().reshape(n, -1),
        dmin.half().reshape(n, -1) if b.mins else None,
    )


@dataclass
class _Numbers:
    """Integers s and m (B, subs), fp16 values d and dmin (B, 1), all stored in fp32."""

    s: torch.Tensor
    m: torch.Tensor
    d: torch.Tensor
    dmin: torch.Tensor


class _Search:
    """Super-blocks x (B, subs, sub) with weights of errors of the same shape or (1, subs, sub)."""

    def __init__(self, b: BlockKind, x: torch.Tensor, weights: torch.Tensor) -> None:
        self.b, self.x, self.w, self.wx = b, x, weights, weights * x
        self.values, self.order = b.values(x.device).sort()
        if b.table:  # integers: a look-up of half steps, 4 times as fast as a binary search
            halves = (torch.arange(4 * REACH, device=x.device) - 2 * REACH + 0.5) / 2
            self.place_of = torch.bucketize(halves, (self.values[1:] + self.values[:-1]) / 2)
        self.free_low = b.elements == b.sub  # dmin of a single sub-block may be negative

    def places(self, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The index of each weight's nearest value in the sorted values, for steps and lows (B, subs)."""
        step = torch.where(step == 0, TINY, step)
        over = (self.x + low.unsqueeze(-1)) / step.unsqueeze(-1) if self.b.mins else self.x / step.unsqueeze(-1)
        if self.b.table:
            return self.place_of[over.mul_(2).floor_().add_(2 * REACH).clamp_(0, 4 * REACH - 1).int()]
        return (over + self.b.mid).round_().clamp_(0, self.b.levels - 1)

    def nearest(self, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Codes (B, subs, sub)."""
        places = self.places(step, low)
        return self.order[places] if self.b.table else places

    def held(self, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The values v (B, subs, sub) of the nearest codes; a dequantized weight is step * v - low."""
        places = self.places(step, low)
        return self.values[places] if self.b.table else places - self.b.mid

    def loss(self, v: torch.Tensor, step: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The weighted squared errors (B, subs)."""
        off = torch.addcmul(self.x, v, step.unsqueeze(-1), value=-1)
        if self.b.mins:
            off += low.unsqueeze(-1)
        return (off.square_() * self.w).sum(-1)

    def start(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The best step and low (B, subs) of each sub-block on its own, before rounding."""
        b = self.b
        least, most = self.x.amin(-1), self.x.amax(-1)
        starts = []
        if b.mins:
            least = least if self.free_low else least.clamp(max=0)
            for share, below in product(SHARES, CUTS):
                cut = (1 - share) * (most - least) * below
                starts.append(((most - least) * share / (b.levels - 1), -(least + cut)))
        else:
            zero, reach = torch.zeros_like(least), float(self.values.abs().max())
            tip = torch.where(-least > most, least, most)  # gets the table's value of largest magnitude, which is negative
            starts = [(-tip * sign * share / reach, zero) for share in (*SHARES, 1.1) for sign in (1.0, -1.0)]
        best = torch.full_like(least, torch.inf)
        step, low = starts[0]
        for s, z in starts:
            for _ in range(REFITS + 1):
                v = self.held(s, z)
                loss = self.loss(v, s, z)
                better = loss < best
                best, step, low = (torch.where(better, a, o) for a, o in ((loss, best), (s, step), (z, low)))
                s, z = self.fitted(v, s)
        return step, low

    def fitted(self, v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and low by weighted least squares for values v; lows that the type cannot hold become 0."""
        wv = v * self.w
        vv, xv = (wv * v).sum(-1), (v * self.wx).sum(-1)
        if not self.b.mins:
            return torch.where(vv > 0, xv / vv.clamp(min=TINY), s), torch.zeros_like(s)
        w1, v1, x1 = self.w.sum(-1).expand_as(vv), wv.sum(-1), self.wx.sum(-1)
        det = vv * w1 - v1 * v1
        sound = det > 1e-6 * vv * w1
        det = torch.where(sound, det, 1.0)
        step, low = torch.where(sound, (xv * w1 - x1 * v1) / det, s), torch.where(sound, (xv * v1 - x1 * vv) / det, -x1 / w1)
        if self.free_low:
            return step, low
        through_zero = torch.where(vv > 0, xv / vv.clamp(min=TINY), s)
        held = (low >= 0) & (step >= 0)
        return torch.where(held, step, through_zero.clamp(min=0)), torch.where(held, low, 0.0)

    def best(self, alone: tuple[torch.Tensor, torch.Tensor]) -> _Numbers:
        """Integers and fp16 numbers: rounded from the sub-blocks' steps and lows, then improved."""
        step, low = alone
        now = self._rounded(step, low)
        result, best = now, self._total(now)
        for _ in range(ROUNDS):
            if self.b.scales != (1, 1):
                now = self._moved(now)
            now = self._refit(now)
            loss = self._total(now)
            better = loss < best
            if not bool(better.any()):
                break
            best = torch.where(better, loss, best)
            pick = better.unsqueeze(-1)
            result = _Numbers(*(torch.where(pick, getattr(now, f), getattr(result, f)) for f in ("s", "m", "d", "dmin")))
        return result

    def _half(self, t: torch.Tensor) -> torch.Tensor:
        if bool((t.abs() > HALF_MAX).any()):
            raise SchemeError(f"weights up to {float(self.x.abs().max()):.3g} are beyond what GGUF's fp16 scales reach")
        return t.half().float()

    def _rounded(self, step: torch.Tensor, low: torch.Tensor) -> _Numbers:
        (least, most), top = self.b.scales, self.b.mins
        if (least, most) == (1, 1):
            return _Numbers(torch.ones_like(step), torch.ones_like(step), self._half(step), self._half(low))
        tip = step.gather(1, step.abs().argmax(1, keepdim=True))  # gets the integer of largest magnitude
        d = self._half(tip / (least if least < 0 else most))
        dmin = self._half(low.amax(1, keepdim=True) / max(top, 1))
        return _Numbers(self._whole(step, d, least, most), self._whole(low, dmin, 0, top), d, dmin)

    @staticmethod
    def _whole(t: torch.Tensor, unit: torch.Tensor, least: int, most: int) -> torch.Tensor:
        return torch.where(unit == 0, 0.0, t / torch.where(unit == 0, 1.0, unit)).round().clamp(least, most)

    def _total(self, n: _Numbers) -> torch.Tensor:
        step, low = n.d * n.s, n.dmin * n.m
        return self.loss(self.held(step, low), step, low).sum(-1)

    def _moved(self, n: _Numbers) -> _Numbers:
        """For fixed d and dmin: the best integers among the present ones and their neighbors, each with its nearest codes."""
        (least, most), top = self.b.scales, self.b.mins
        best = torch.full_like(n.s, torch.inf)
        s, m = n.s, n.m
        for up in (0, 1, -1):
            for lift in (0, 1, -1) if top else (0,):
                a, c = (n.s + up).clamp(least, most), (n.m + lift).clamp(0, top)
                of_step, of_low = n.d * a, n.dmin * c
                loss = self.loss(self.held(of_step, of_low), of_step, of_low)
                better = loss < best
                best, s, m = (torch.where(better, x, y) for x, y in ((loss, best), (a, s), (c, m)))
        return _Numbers(s, m, n.d, n.dmin)

    def _refit(self, n: _Numbers) -> _Numbers:
        """d and dmin by weighted least squares over the super-block, for fixed codes and integers."""
        v = self.held(n.d * n.s, n.dmin * n.m) * n.s.unsqueeze(-1)

        def over(t: torch.Tensor) -> torch.Tensor:
            return t.sum((-1, -2)).unsqueeze(-1)

        wv = v * self.w
        vv, xv = over(wv * v), over(self.wx * v)
        alone = torch.where(vv > 0, xv / vv.clamp(min=TINY), n.d)
        if not self.b.mins:
            return _Numbers(n.s, n.m, self._half(alone), n.dmin)
        m = n.m.unsqueeze(-1)
        mm, vm, xm = over(self.w * m * m), over(wv * m), over(self.wx * m)
        det = vv * mm - vm * vm
        sound = det > 1e-6 * vv * mm
        det = torch.where(sound, det, 1.0)
        d = torch.where(sound, (xv * mm - xm * vm) / det, n.d)
        dmin = torch.where(sound, (xv * vm - xm * vv) / det, n.dmin)
        return _Numbers(n.s, n.m, self._half(d), self._half(dmin if self.free_low else dmin.clamp(min=0)))
