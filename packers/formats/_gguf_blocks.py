"""GGUF's two-level blocks: fp16 numbers d and dmin per super-block, and small integers s and m per sub-block.

            weights, sub-block, bytes
    Q2_K    256  16   84   w = d * s * q - dmin * m        s, m of 4 bits
    Q3_K    256  16  110   w = d * s * (q - 4)             s of 6 bits, -32 .. 31
    Q4_K    256  32  144   w = d * s * q - dmin * m        s, m of 6 bits
    Q5_K    256  32  176   the same with q of 5 bits
    Q6_K    256  16  210   w = d * s * (q - 32)            s of 8 bits, -128 .. 127
    IQ4_XS  256  32  136   w = d * s * iq4_nl[q]           s of 6 bits, -32 .. 31
    Q5_0     32  32   22   w = d * (q - 16)                s is 1
    Q5_1     32  32   24   w = d * q + m                   dmin is -m, s and m are 1

The bits of a code are in one or two bit planes. A run of n bytes in a plane holds 8 / bits runs of n codes, the first run in
the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lowq_packers import tables
from lowq_packers.errors import DamagedError
from lowq_packers.lazy import torch


class Plane(NamedTuple):
    """A bit plane: the number of bits of every code, the bytes per run, and the number of lower bits in the other plane."""

    bits: int
    run: int
    above: int = 0

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """(n, bytes) -> (n, codes) uint8."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8).reshape(-1, 1)
        runs = stored.reshape(len(stored), -1, 1, self.run)
        return (((runs >> shifts) & ((1 << self.bits) - 1)) << self.above).reshape(len(stored), -1)

    def write(self, codes: torch.Tensor) -> torch.Tensor:
        """Inverse of `read`; takes complete codes."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8).reshape(-1, 1)
        runs = (codes >> self.above & ((1 << self.bits) - 1)).reshape(len(codes), -1, 8 // self.bits, self.run)
        return (runs << shifts).sum(-2, dtype=torch.uint8).reshape(len(codes), -1)


Pair = tuple["torch.Tensor", "torch.Tensor | None"]


def _nibbles(stored: torch.Tensor) -> Pair:
    return stored & 15, stored >> 4


def _to_nibbles(s: torch.Tensor, m: torch.Tensor | None) -> torch.Tensor:
    assert m is not None
    return s | m << 4


def _six_pairs(stored: torch.Tensor) -> Pair:
    """12 bytes: 6-bit s and m of the first four sub-blocks, with the upper two bits of the last four in the bits above them."""
    s, m, both = stored.reshape(-1, 3, 4).unbind(1)
    return torch.cat([s & 63, both & 15 | s >> 2 & 48], -1), torch.cat([m & 63, both >> 4 | m >> 2 & 48], -1)


def _to_six_pairs(s: torch.Tensor, m: torch.Tensor | None) -> torch.Tensor:
    assert m is not None
    first, last = (t[:, :4] for t in (s, m)), (t[:, 4:] for t in (s, m))
    return torch.cat([*(a | (b & 48) << 2 for a, b in zip(first, last, strict=True)), s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], -1)


def _six_of_16(stored: torch.Tensor) -> Pair:
    """12 bytes of 16 numbers: the lower four bits in eight bytes, then the upper two in four bytes; 32 is subtracted."""
    low, high = Plane(4, 8).read(stored[:, :8]), Plane(2, 4, 4).read(stored[:, 8:])
    return (low | high).to(torch.int16) - 32, None


def _to_six_of_16(s: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    whole = (s + 32).to(torch.uint8)
    return torch.cat([Plane(4, 8).write(whole), Plane(2, 4, 4).write(whole)], -1)


def _six_of_8(stored: torch.Tensor) -> Pair:
    """6 bytes of eight numbers: the upper two bits in two bytes, then the lower four in four bytes; 32 is subtracted."""
    high, low = Plane(2, 1, 4).read(stored[:, :2]), Plane(4, 1).read(stored[:, 2:])
    return (low | high).to(torch.int16) - 32, None


def _to_six_of_8(s: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    whole = (s + 32).to(torch.uint8)
    return torch.cat([Plane(2, 1, 4).write(whole), Plane(4, 1).write(whole)], -1)


def _bytes_of_16(stored: torch.Tensor) -> Pair:
    return stored.contiguous().view(torch.int8), None


def _to_bytes_of_16(s: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return s.to(torch.int8).view(torch.uint8)


@dataclass(frozen=True)
class BlockKind:
    """One of the two-level types.

    sub: weights per sub-block. levels: number of values of q. mid: the number subtracted from q. scales: the smallest and the
    largest s. mins: the largest m, 0 for types without m. fields: the parts of a block in order, with their bytes.
    """

    elements: int
    sub: int
    levels: int
    mid: int
    scales: tuple[int, int]
    mins: int
    planes: dict[str, Plane]
    fields: tuple[tuple[str, int], ...]
    read_scales: Callable[[torch.Tensor], Pair] | None = None
    write_scales: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
    table: str = ""

    def values(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """(levels,) fp32: the value of each code before s, d and m."""
        if self.table:
            return torch.tensor(tables.FIXED[self.table], device=device)
        return torch.arange(self.levels, dtype=torch.float32, device=device) - self.mid


BLOCK_KINDS = {
    "Q2_K": BlockKind(256, 16, 4, 0, (0, 15), 15, {"qs": Plane(2, 32)},
                      (("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)), _nibbles, _to_nibbles),
    "Q3_K": BlockKind(256, 16, 8, 4, (-32, 31), 0, {"qs": Plane(2, 32), "qh": Plane(1, 32, 2)},
                      (("qh", 32), ("qs", 64), ("scales", 12), ("d", 2)), _six_of_16, _to_six_of_16),
    "Q4_K": BlockKind(256, 32, 16, 0, (0, 63), 63, {"qs": Plane(4, 32)},
                      (("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)), _six_pairs, _to_six_pairs),
    "Q5_K": BlockKind(256, 32, 32, 0, (0, 63), 63, {"qs": Plane(4, 32), "qh": Plane(1, 32, 4)},
                      (("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)), _six_pairs, _to_six_pairs),
    "Q6_K": BlockKind(256, 16, 64, 32, (-128, 127), 0, {"qs": Plane(4, 64), "qh": Plane(2, 32, 4)},
                      (("qs", 128), ("qh", 64), ("scales", 16), ("d", 2)), _bytes_of_16, _to_bytes_of_16),
    "IQ4_XS": BlockKind(256, 32, 16, 0, (-32, 31), 0, {"qs": Plane(4, 16)},
                        (("d", 2), ("scales", 6), ("qs", 128)), _six_of_8, _to_six_of_8, "iq4_nl"),
    "Q5_0": BlockKind(32, 32, 32, 16, (1, 1), 0, {"qs": Plane(4, 16), "qh": Plane(1, 1, 4)},
                      (("d", 2), ("qh", 4), ("qs", 16))),
    "Q5_1": BlockKind(32, 32, 32, 0, (1, 1), 1, {"qs": Plane(4, 16), "qh": Plane(1, 1, 4)},
                      (("d", 2), ("dmin", 2), ("qh", 4), ("qs", 16))),
}  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """A matrix (N, K) of a two-level type, as separate tensors.

    codes: (N, K) uint8. s, m: (N, K / sub) integers; m is None for types without it. d, dmin: (N, K / elements) fp16.
    """

    kind: str
    codes: torch.Tensor
    s: torch.Tensor
    m: torch.Tensor | None
    d: torch.Tensor
    dmin: torch.Tensor | None

    @property
    def steps(self) -> torch.Tensor:
        """(N, K / sub) fp32: d * s."""
        return self._each(self.d) * self.s.float()

    @property
    def lows(self) -> torch.Tensor | None:
        """(N, K / sub) fp32: dmin * m."""
        return None if self.dmin is None or self.m is None else self._each(self.dmin) * self.m.float()

    def _each(self, of_block: torch.Tensor) -> torch.Tensor:
        return of_block.float().repeat_interleave(self.s.shape[1] // self.d.shape[1], 1)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Blocks:
        """These blocks with `change` applied to every tensor, e.g. to select rows or move to another device."""
        m, dmin = (None if t is None else change(t) for t in (self.m, self.dmin))
        return Blocks(self.kind, change(self.codes), change(self.s), m, change(self.d), dmin)

    def same(self, other: Blocks) -> bool:
        """Whether all tensors are equal."""
        pairs = [(getattr(self, f), getattr(other, f)) for f in ("codes", "s", "m", "d", "dmin")]
        return all(a is b is None or torch.equal(a, b) for a, b in pairs)

    def dequantize(self) -> torch.Tensor:
        """(N, K) fp32: the definition."""
        values = self.values.reshape(*self.s.shape, -1)
        w, lows = self.steps.unsqueeze(-1) * values, self.lows
        return (w if lows is None else w - lows.unsqueeze(-1)).reshape(self.codes.shape)

    @property
    def values(self) -> torch.Tensor:
        """(N, K) fp32: the values of the codes before scales."""
        return BLOCK_KINDS[self.kind].values(self.codes.device)[self.codes.int()]


def read_blocks(raw: torch.Tensor, kind: str, N: int, K: int, name: str = "a tensor") -> Blocks:
    """Decode a tensor's bytes. Raises DamagedError, with `name`, if d or dmin is NaN or infinite."""
    b = BLOCK_KINDS[kind]
    rows = raw.reshape(N * K // b.elements, -1)
    part = dict(zip((f for f, _ in b.fields), rows.split([n for _, n in b.fields], 1), strict=True))
    codes = torch.stack([plane.read(part[f]) for f, plane in b.planes.items()]).sum(0, dtype=torch.uint8)
    d, dmin = (part[f].contiguous().view(torch.float16).reshape(N, -1) if f in part else None for f in ("d", "dmin"))
    assert d is not None
    if not d.isfinite().all() or not (dmin is None or dmin.isfinite().all()):
        raise DamagedError(f"{name} holds NaN or infinite scales; the model file is damaged")
    if b.read_scales is None:  # one sub-block, with s = 1 and m = 1
        one = torch.ones_like(d, dtype=torch.int16)
        return Blocks(kind, codes.reshape(N, K), one, None if dmin is None else one, d, None if dmin is None else -dmin)
    s, m = b.read_scales(part["scales"])
    s, m = s.to(torch.int16).reshape(N, -1), None if m is None else m.to(torch.int16).reshape(N, -1)
    return Blocks(kind, codes.reshape(N, K), s, m, d, dmin)


def write_blocks(q: Blocks) -> torch.Tensor:
    """(N, bytes) uint8: inverse of `read_blocks`."""
    b = BLOCK_KINDS[q.kind]
    codes = q.codes.reshape(-1, b.elements)
    dmin = q.dmin if q.dmin is None or b.read_scales else -q.dmin
    part = {f: plane.write(codes) for f, plane in b.planes.items()}
    part |= {f: t.reshape(-1, 1).contiguous().view(torch.uint8) for f, t in (("d", q.d), ("dmin", dmin)) if t is not None}
    if b.write_scales:
        signed = b.scales[0] < 0
        s = q.s.reshape(len(codes), -1)
        m = None if q.m is None else q.m.reshape(len(codes), -1).to(torch.uint8)
        part["scales"] = b.write_scales(s if signed else s.to(torch.uint8), m)
    return torch.cat([part[f] for f, _ in b.fields], 1).reshape(q.codes.shape[0], -1)
