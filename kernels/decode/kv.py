"""Keys and values cached in few bits: the definition, in torch and fp32, that tests hold every attention kernel to.

    fp8   e4m3 codes, a byte a value; a byte a head and token, a number of 3 bits after the first: value = code * scale
    4     codes of 4 bits, dim 2 i in the lower half of byte i; two bf16 a head and token: value = code * step + low

What is encoded is the Hadamard transform of each head.

A scale belongs to one token of one head, so that a token is written once, from its own values. A scale per block of tokens
would change while the block fills up: earlier tokens would be rounded a second time, and the text would depend on how its
prompt was split. A head of D values takes D + 1 bytes in fp8 and D / 2 + 4 in 4 bits, of 2 D in 16 bits: 0.504 and 0.266 for
D = 128, 0.508 and 0.281 for D = 64.

Some channels of keys are ten times larger than the others (KIVI); the transform spreads them over all channels (QuaRot).
Queries are transformed alike, and the output is transformed back: the transform is its own inverse. Heads whose size is not
a power of two are transformed in parts. Of TRIES scales the one with the least squared error is chosen. For the model base
and 65,536 tokens of WikiText-2, fp8 raises perplexity by 0.09% (0.15% without the transform, 0.14% with the first scale),
4 bits by 0.99% (1.42% with the first range).

Sources: e4m3: Micikevicius et al. 2022 (arXiv:2209.05433); KIVI: Liu et al. 2024 (arXiv:2402.02750);
QuaRot: Ashkboos et al. 2024 (arXiv:2404.00456).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lowq_packers.errors import UsageError

KINDS = ("16", "fp8", "4")
PLAIN = KINDS[0]  # the model's own dtype
LEVELS = 15  # the largest code of 4 bits
TRIES = 8
SHORTER = 0.04  # each try shortens the range of 4-bit codes by this fraction of the full range
LARGEST = 448.0  # the largest number of e4m3
FIRST = 103 << 3  # fp8's scales run from 2^-24 to 2^8: byte b is the fp32 number with bits (FIRST + b) << 20


def check(kind: str) -> str:
    """`kind` itself. Raises UsageError if it is not one of KINDS."""
    if kind not in KINDS:
        raise UsageError(f"--kv {kind} must be one of {', '.join(KINDS)}")
    return kind


def slot_bytes(kind: str, D: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys, or values, of one head."""
    return {"16": D * dtype.itemsize, "fp8": D + 1, "4": D // 2 + 4}[kind]


def part_of(D: int) -> int:
    """Dims that are transformed together: the largest power of two that divides D."""
    return D & -D


@cache
def _hadamard(n: int, device: torch.device) -> torch.Tensor:
    """H (n, n) / sqrt(n), Sylvester's: symmetric, its own inverse; negative where i & j has an odd number of bits."""
    with torch.inference_mode(False):
        h = torch.ones(1, 1)
        while h.shape[0] < n:
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
        return (h / n**0.5).to(device)


def turn(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform of heads x (..., D) fp32, in parts of `part_of`; its own inverse."""
    n = part_of(x.shape[-1])
    return (x.reshape(*x.shape[:-1], -1, n) @ _hadamard(n, x.device)).reshape(x.shape)


def encode(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (..., D) or (..., D / 2) uint8, and scales (...) uint8 or (..., 2) bf16, of heads x (..., D)."""
    x = turn(x.float())
    tried = _e4m3(x) if kind == "fp8" else _four(x)
    codes, scales = next(tried)
    least = _squares(kind, codes, scales, x)
    for other, its in tried:
        error = _squares(kind, other, its, x)
        better = error < least
        codes, least = torch.where(better[..., None], other, codes), torch.where(better, error, least)
        scales = torch.where(better if kind == "fp8" else better[..., None], its, scales)
    return (codes, scales) if kind == "fp8" else (codes[..., ::2] | codes[..., 1::2] << 4, scales)


Tries = Iterator[tuple[torch.Tensor, torch.Tensor]]


def _e4m3(x: torch.Tensor) -> Tries:
    """Codes and scales. Tries the smallest scale with all values in e4m3's range, and the next ones."""
    first = (((x.abs().amax(-1) / LARGEST).view(torch.int32) + 0xFFFFF) >> 20) - FIRST
    for i in range(TRIES):
        scale = (first + i).clamp(0, 255)
        by = 1 / _scale(scale)
        codes = (x * by[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        yield codes, scale.to(torch.uint8)


def _four(x: torch.Tensor) -> Tries:
    """Codes, one per byte, and (step, low). Tries the whole range of the values, and shorter ranges around its middle."""
    low, high = x.aminmax(dim=-1)
    middle, half = (low + high) / 2, (high - low) / 2
    for i in range(TRIES):
        reach = half * (1 - SHORTER * i)
        scales = torch.stack((reach * (2 / LEVELS), middle - reach), -1).bfloat16()
        step = scales[..., :1].float()
        by = torch.where(step > 0, 1 / step, 0.0)
        yield ((x - scales[..., 1:].float()) * by).round().clamp(0, LEVELS).to(torch.uint8), scales


def _squares(kind: str, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (_values(kind, codes, scales) - x).square().sum(-1)


def _values(kind: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The transformed values of codes, one code per byte."""
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float() * _scale(scales.int())[..., None]
    return codes.float() * scales[..., :1].float() + scales[..., 1:].float()


def _scale(byte: torch.Tensor) -> torch.Tensor:
    """An fp8 scale in fp32."""
    return (byte + FIRST << 20).view(torch.float32)


def decode(kind: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Heads (..., D) fp32 from the output of `encode`."""
    if kind == "4":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return turn(_values(kind, codes, scales))


@dataclass(frozen=True)
class Coded:
    """Keys or values of a layer in codes; indexed like a tensor (sequences or blocks, HKV, S, D), by its first three dims.

    codes (..., S, D or D / 2) uint8; scales (..., S) uint8 or (..., S, 2) bf16. Indexing decodes, assignment encodes; kernels
    read both tensors directly.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the equivalent 16-bit tensor."""
        B, HKV, S, width = self.codes.shape
        return B, HKV, S, width if self.kind == "fp8" else 2 * width

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return decode(self.kind, self.codes[index], self.scales[index])

    def __setitem__(self, index: Any, x: torch.Tensor) -> None:
        self.codes[index], self.scales[index] = encode(self.kind, x)

    def part(self, some: Any) -> "Coded":
        """A view of some sequences."""
        return replace(self, codes=self.codes[some], scales=self.scales[some])

    def transpose(self, a: int, b: int) -> "Coded":
        """A view with two of the first three dims exchanged."""
        return replace(self, codes=self.codes.transpose(a, b), scales=self.scales.transpose(a, b))

    def zero_(self) -> None:
        """Make it hold zeros."""
        self.codes.zero_()
        self.scales.zero_()


Cache = torch.Tensor | Coded


def empty(kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Cache:
    """A cache of shape (sequences or blocks, HKV, S, D), of any contents."""
    if kind == PLAIN:
        return torch.empty(*shape, dtype=dtype, device=device)
    *slots, D = shape
    codes = torch.empty(*slots, D if kind == "fp8" else D // 2, dtype=torch.uint8, device=device)
    scales = (slots, torch.uint8) if kind == "fp8" else ((*slots, 2), torch.bfloat16)
    return Coded(kind, codes, torch.empty(scales[0], dtype=scales[1], device=device))


def zeros(kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Cache:
    """As `empty`, of zeros."""
    cache = empty(kind, shape, dtype, device)
    cache.zero_()
    return cache


def holding(kind: str, x: torch.Tensor) -> Cache:
    """A cache of x (sequences or blocks, HKV, S, D); in 16 bits x itself."""
    if kind == PLAIN:
        return x
    cache = empty(kind, x.shape, x.dtype, x.device)
    cache[:] = x
    return cache


def part(held: Cache, some: Any) -> Cache:
    """A view of some sequences of a cache."""
    return held.part(some) if isinstance(held, Coded) else held[some]


def kind_of(held: Cache) -> str:
    """The encoding of a cache: one of KINDS."""
    return held.kind if isinstance(held, Coded) else PLAIN
