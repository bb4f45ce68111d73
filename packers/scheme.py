"""Scheme: how one weight is quantized. The only place that lists the bit-widths and says which group sizes are legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lowq_packers.errors import SchemeError

BITS = (8, 4, 3, 2, 1)
GROUP_STEP = 16  # group sizes are multiples of a tensor core's k step, so that no fragment straddles two groups
ZeroKind = Literal["float", "int", "none"]
ZERO_KINDS: tuple[ZeroKind, ...] = get_args(ZeroKind)
TABLES: dict[str, tuple[int, ...]] = {"e2m1": (4,), "nf4": (4,), "iq4_nl": (4,), "fitted": (4, 3, 2)}  # and their widths
ScaleKind = Literal["float", "e4m3", "e8m0", "f32"]
SCALE_KINDS: tuple[ScaleKind, ...] = tuple(kind for kind in get_args(ScaleKind) if kind != "f32")  # which is of blocks alone
Act = Literal["none", "int8", "fp8"]  # how activations are rounded at run time
ACTS: tuple[Act, ...] = get_args(Act)
E4M3 = "e4m3"  # the table of all values of an 8-bit float; the only one whose scales may be those of blocks: see fp8.py
Block = tuple[int, int]  # rows and columns of a matrix in fp8 that share a scale
BLOCKS: dict[str, Block] = {"128x128": (128, 128), "256x256": (256, 256)}
ACT_KEY = "lowq_act"  # key in the quantization_config of fp8 for activations other than its "dynamic"
DEFAULT_BLOCK = "128x128"  # the block of DeepSeek's checkpoints and of all other engines


@dataclass(frozen=True)
class Scheme:
    """Codes of `bits` bits, one scale (and zero) per `group_size` consecutive k of a row.

    w[n, k] = (q[n, k] - zeros[n, g]) * scales[n, g], g = k // group_size, q in 0 .. 2**bits - 1.
    zero: "float" (HQQ), "int" (GPTQ, AWQ: whole numbers 0 .. 2**bits - 1), "none" (the constant `mid`, not stored).
    table: "", or w = table[q] * scales (and zero is "none"): see tables.py. scale: "float", or how its bytes are read.
    block_rows: rows that share a scale, more than 1 only where the table is E4M3; the last block along N or K may be partial.
    Raises SchemeError for a width, group size, kind of zero, table or scale that does not exist.
    """

    bits: int
    group_size: int
    zero: ZeroKind = "float"
    table: str = ""
    scale: ScaleKind = "float"
    block_rows: int = 1

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise SchemeError(f"bits={self.bits!r} is not a width lowq packs; use one of {', '.join(map(str, BITS))}")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise SchemeError(f"group_size={self.group_size!r} is not a positive number; use 32, 64, 128 or K")
        if self.zero not in ZERO_KINDS:
            raise SchemeError(f"zero={self.zero!r} is not a kind of zero; use one of {', '.join(ZERO_KINDS)}")
        if self.block_rows != 1:
            if self.block_rows < 1 or (self.bits, self.zero, self.table, self.scale) != (8, "none", E4M3, "f32"):
                raise SchemeError(f"{self.block_rows} rows share a scale, which only {E4M3} weights support")
            return
        if self.table and self.table not in TABLES:
            raise SchemeError(f"table={self.table!r} does not exist; use one of {', '.join(TABLES)}")
        if self.table and self.bits not in TABLES[self.table]:
            names = ", ".join(map(str, TABLES[self.table]))
            raise SchemeError(f"table {self.table} has {names} bits, not {self.bits}")
        if self.table and self.zero != "none":
            raise SchemeError(f'zero={self.zero!r} with table {self.table}, whose values need no zero; use zero="none"')
        if self.scale not in SCALE_KINDS:
            raise SchemeError(f"scale={self.scale!r} is not a kind of scale; use one of {', '.join(SCALE_KINDS)}")
        if self.scale != "float" and not self.table:
            raise SchemeError(f"scale={self.scale!r} goes with a table; use scale='float'")

    @classmethod
    def of(cls, bits: int, group_size: int, kind: str) -> Scheme:
        """The scheme of that `kind`, such as "float", "nf4" or "e2m1/e4m3"."""
        if kind in ZERO_KINDS:
            return cls(bits, group_size, kind)
        table, _, scale = kind.partition("/")
        if table == E4M3 and scale.isdigit():
            return cls.in_blocks((int(scale), group_size))
        return cls(bits, group_size, "none", table, scale or "float")  # type: ignore[arg-type]

    @classmethod
    def in_blocks(cls, block: Block) -> Scheme:
        """Weights in fp8 with a scale for each block."""
        return cls(8, block[1], "none", E4M3, "f32", block[0])

    @property
    def block(self) -> Block:
        """Rows and columns that share a scale."""
        return self.block_rows, self.group_size

    @property
    def kind(self) -> str:
        """What its values are: the kind of zero, or the table and, unless they are floats, the scales: "e2m1/e4m3"."""
        if not self.table:
            return self.zero
        if self.table == E4M3:
            return f"{E4M3}/{self.block_rows}"
        return self.table if self.scale == "float" else f"{self.table}/{self.scale}"

    @property
    def table_width(self) -> int:
        """Numbers in fp32 that a whole weight holds: its own table, the factor of its e4m3 scales, or none."""
        return self.levels if self.table == "fitted" else int(self.table != "" and self.scale == "e4m3")

    @property
    def levels(self) -> int:
        """Number of codes: 2**bits."""
        return 1 << self.bits

    @property
    def mid(self) -> float:
        """The zero of the kind "none": 2**(bits-1), and 0.5 at 1 bit, where the two levels are then -s/2 and +s/2."""
        return float(1 << (self.bits - 1)) if self.bits > 1 else 0.5

    def groups(self, K: int) -> int:
        """Number of groups in a row of K codes. Raises SchemeError, naming a way out, if K cannot be grouped so."""
        if K < 1:
            raise SchemeError("the weight has no columns (K = 0); there is nothing to quantize")
        if self.group_size == K:
            return 1
        if self.table == E4M3:
            return -(-K // self.group_size)
        if self.group_size % GROUP_STEP:
            raise SchemeError(f"group_size={self.group_size} is neither a multiple of {GROUP_STEP} nor K={K} (per channel)")
        if K % self.group_size:
            fallback = fit_group(K, self.group_size)
            raise SchemeError(f"K={K} is not a multiple of group_size={self.group_size}; use --group {fallback or 'channel'}")
        return K // self.group_size

    def bits_per_weight(self) -> float:
        """Bits stored per weight with scales (and zeros) of 16 bits each, of a table's 8, or of a block's 32."""
        stored = 1 if self.zero == "none" else 2
        width = 32 if self.table == E4M3 else 16 if self.scale == "float" else 8
        return self.bits + stored * width / (self.group_size * self.block_rows)

    def __str__(self) -> str:
        if self.table == E4M3:
            return f"fp8 {self.block_rows}x{self.group_size}"
        if self.table:
            return f"{self.bits}-bit g{self.group_size} {self.kind}"
        return f"{self.bits}-bit g{self.group_size}" + ("" if self.zero == "float" else f" {self.zero} zero")


def fit_group(K: int, largest: int) -> int | None:
    """Largest legal group size (a multiple of 16 that divides K) not above `largest`; None if there is none."""
    start = min(largest, K) // GROUP_STEP * GROUP_STEP
    return next((g for g in range(start, 0, -GROUP_STEP) if K % g == 0), None)


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, int]:
    """Shape of the scales of an fp8 matrix (M, K)."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
