"""QuantizedTensor: one code per byte with its scales and zeros. `dequantize` is the definition all kernels are held to."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowq_packers.errors import SchemeError
from lowq_packers.lazy import torch
from lowq_packers.scheme import Scheme, ZeroKind

LOST = 2.0**-6  # of a tensor's norm: bf16 rounds by 2**-9


def plausible(companion: torch.Tensor, zeros_of: Scheme | None = None) -> torch.Tensor:
    """Whether scales, or zeros of a scheme, are what a quantizer writes: a bool () on their device.

    That is finite; of the zero kind "int" also whole codes.
    """
    good = companion.isfinite().all()
    if zeros_of is not None and zeros_of.zero == "int":
        good = good & ((companion == companion.round()) & (companion >= 0) & (companion < zeros_of.levels)).all()
    return good


def fits(t: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether scales or zeros survive in `dtype`: none becomes infinite, and what is lost is rounding, not the values.

    Some may become 0, as those of rows that are next to nothing do in fp16 (below 6e-8); all of them may not.
    """
    if t.dtype == dtype or t.is_meta or not t.numel():
        return True
    wide, cast = t.double(), t.to(dtype).double()
    return bool(torch.isfinite(cast).all()) and bool((cast - wide).norm() <= LOST * wide.norm())


def check_fits(what: str, dtype: torch.dtype, *tensors: torch.Tensor | None) -> None:
    """Raise SchemeError, naming a dtype that can, where `dtype` cannot hold scales or zeros."""
    if not all(t is None or fits(t, dtype) for t in tensors):
        narrow = str(dtype).removeprefix("torch.")
        then = "bfloat16 or float32" if dtype == torch.float16 else "float32"
        raise SchemeError(f"{what}: its scales do not fit {narrow}; use {then}")


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized (N, K) weight, w[n, k] = (W_q[n, k] - zeros[n, k // group_size]) * scales[n, k // group_size].

    Args:
        W_q: (N, K) uint8 codes, 0 .. 2**bits - 1.
        scales: (N, K // group_size) fp16, bf16 or fp32, in weight units.
        zeros: (N, K // group_size) in code units, any float dtype; None means the constant `scheme.mid`.
        bits, group_size: the scheme; group_size = K is per channel.
        zero: "float" or "int"; by default "float" where zeros are given and "none" where not.
    Raises:
        SchemeError: shapes, dtypes or codes that do not fit the scheme.
    """

    W_q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    zero: ZeroKind | None = None
    scheme: Scheme = field(init=False)

    def __post_init__(self) -> None:
        kind: ZeroKind = self.zero or ("none" if self.zeros is None else "float")
        object.__setattr__(self, "zero", kind)
        object.__setattr__(self, "scheme", Scheme(self.bits, self.group_size, kind))
        if self.W_q.dim() != 2 or self.W_q.dtype != torch.uint8:
            raise SchemeError(f"W_q must be (N, K) uint8, got {tuple(self.W_q.shape)} {self.W_q.dtype}")
        N, K = self.W_q.shape
        expected = (N, self.scheme.groups(K))
        if (self.zeros is None) != (kind == "none"):
            raise SchemeError(f'zero="{kind}" and zeros={"None" if self.zeros is None else "a tensor"} contradict each other')
        for name, t in (("scales", self.scales), ("zeros", self.zeros)):
            if t is not None and (tuple(t.shape) != expected or not t.is_floating_point()):
                raise SchemeError(f"{name} must be {expected} float for W_q {(N, K)}, got {tuple(t.shape)} {t.dtype}")
        if self.bits < 8 and self.W_q.numel() and int(self.W_q.max()) >= self.scheme.levels:
            raise SchemeError(f"W_q holds code {int(self.W_q.max())}; {self.bits} bits end at {self.scheme.levels - 1}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out_features, in_features."""
        return self.W_q.shape[0], self.W_q.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The (N, K) weight these codes stand for, computed in fp32 and rounded once to `dtype` (None: not)."""
        N, K = self.shape
        q = self.W_q.float().reshape(N, -1, self.group_size)
        zeros = self.scheme.mid if self.zeros is None else self.zeros.float().unsqueeze(-1)
        return ((q - zeros) * self.scales.float().unsqueeze(-1)).reshape(N, K).to(dtype or torch.float32)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QuantizedTensor(self.W_q.to(device), self.scales.to(device), zeros, self.bits, self.group_size, self.zero)
