"""Scheme: how one weight is quantized. The only place that lists the bit-widths and says which group sizes are legal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lowq_packers.errors import SchemeError

BITS = (8, 4, 3, 2, 1)
GROUP_STEP = 16  # groups are multiples of one tensor-core k step, so no fragment ever straddles two groups
ZeroKind = Literal["float", "int", "none"]
ZERO_KINDS: tuple[ZeroKind, ...] = get_args(ZeroKind)
Act = Literal["none", "int8", "fp8"]  # how activations are rounded at run time
ACTS: tuple[Act, ...] = get_args(Act)
Block = tuple[int, int]  # rows and columns of a matrix in fp8 that share a scale: see fp8.py
BLOCKS: dict[str, Block] = {"128x128": (128, 128), "256x256": (256, 256)}
ACT_KEY = "lowq_act"  # in fp8's quantization_config, where activations are not its own "dynamic"
DEFAULT_BLOCK = "128x128"  # what DeepSeek's own checkpoints and every other engine have


@dataclass(frozen=True)
class Scheme:
    """Codes of `bits` bits, one scale (and zero) per `group_size` consecutive k of a row.

    w[n, k] = (q[n, k] - zeros[n, g]) * scales[n, g], g = k // group_size, q in 0 .. 2**bits - 1.
    zero: "float" (HQQ), "int" (GPTQ, AWQ: whole numbers 0 .. 2**bits - 1), "none" (the constant `mid`, not stored).
    Raises SchemeError for a width, group size or zero kind that does not exist.
    """

    bits: int
    group_size: int
    zero: ZeroKind = "float"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise SchemeError(f"bits={self.bits} is not a width lowq packs; use one of {', '.join(map(str, BITS))}")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise SchemeError(f"group_size={self.group_size} is not a positive number; use 32, 64, 128 or K")
        if self.zero not in ZERO_KINDS:
            raise SchemeError(f"zero={self.zero!r} is not a kind of zero; use one of {', '.join(ZERO_KINDS)}")

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
        if self.group_size == K:
            return 1
        if self.group_size % GROUP_STEP:
            raise SchemeError(f"group_size={self.group_size} is neither a multiple of {GROUP_STEP} nor K={K} (per channel)")
        if K % self.group_size:
            fallback = fit_group(K, self.group_size)
            raise SchemeError(f"K={K} is not a multiple of group_size={self.group_size}; use --group {fallback or 'channel'}")
        return K // self.group_size

    def bits_per_weight(self, meta_bits: int = 16) -> float:
        """Bits stored per weight with scales (and zeros) of `meta_bits` bits each."""
        stored = 1 if self.zero == "none" else 2
        return self.bits + stored * meta_bits / self.group_size

    def __str__(self) -> str:
        return f"{self.bits}-bit g{self.group_size}" + ("" if self.zero == "float" else f" {self.zero} zero")


def fit_group(K: int, wanted: int) -> int | None:
    """Largest legal group size (a multiple of 16 that divides K) not above `wanted`; None if there is none."""
    start = min(wanted, K) // GROUP_STEP * GROUP_STEP
    return next((g for g in range(start, 0, -GROUP_STEP) if K % g == 0), None)


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, int]:
    """Shape of the scales of an fp8 matrix (M, K)."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
