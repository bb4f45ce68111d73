"""QuantizedTensor: one code per byte with its scales and zeros. `dequantize` is the definition that tests hold kernels to."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowq_packers import tables
from lowq_packers.errors import SchemeError, UsageError
from lowq_packers.lazy import torch
from lowq_packers.scheme import E4M3, ScaleKind, Scheme, ZeroKind, scale_shape

LOST = 2.0**-6  # max. change of a tensor, relative to its norm, that counts as rounding (bf16 rounds by 2**-9)


def plausible(t: torch.Tensor, s: Scheme, role: str) -> torch.Tensor:
    """Whether a scheme's scales, zeros or table (`role`: "scale", "zero", "table") are valid: a bool () on their device.

    Valid are finite numbers; for zeros of the kind "int" only codes; for bytes only those that are scales; factors above 0.
    """
    if role == "table":
        return tables.good_companion(s, t)
    if role == "scale" and s.scale in tables.BYTES:
        return tables.good_scales(t, s)
    good = t.isfinite().all()
    if role == "zero" and s.zero == "int":
        good = good & ((t == t.round()) & (t >= 0) & (t < s.levels)).all()
    return good


def fits(t: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether scales or zeros can be cast to `dtype`: none becomes infinite, and the change is no more than rounding.

    Some may become 0, like those of nearly empty rows in fp16 (below 6e-8), but not all.
    """
    if t.dtype == dtype or t.is_meta or not t.numel():
        return True
    wide, cast = t.double(), t.to(dtype).double()
    return bool(torch.isfinite(cast).all()) and bool((cast - wide).norm() <= LOST * wide.norm())


def float_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of scales and activations, given as torch's or by its name. Raises UsageError for any other."""
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float16, torch.bfloat16, torch.float32):
        raise UsageError(f"dtype {dtype!r} is not one lowq computes in; use float16, bfloat16 or float32")
    return chosen


def check_fits(what: str, dtype: torch.dtype, *tensors: torch.Tensor | None) -> None:
    """Raise SchemeError, naming a wider dtype, if `dtype` cannot hold scales or zeros."""
    if not all(t is None or fits(t, dtype) for t in tensors):
        narrow = str(dtype).removeprefix("torch.")
        then = "bfloat16 or float32" if dtype == torch.float16 else "float32"
        raise SchemeError(f"{what}: its scales do not fit {narrow}; use {then}")


def dequantized(
    s: Scheme, W_q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, table: torch.Tensor | None
) -> torch.Tensor:
    """The definition: the values of a QuantizedTensor of these, fp32 (N, K)."""
    if s.table == E4M3:
        from lowq_packers import fp8

        return fp8.Fp8Matrix(W_q.view(fp8.FP8), scales, s.block).dequantize()
    wide = tables.wide(s, scales, table).unsqueeze(-1)
    values = tables.look_up(W_q, tables.values(s, table, W_q.device)) if s.table else W_q.float()
    groups = values.reshape(W_q.shape[0], -1, s.group_size)
    if s.table:
        return (groups * wide).reshape(W_q.shape)
    zero = s.mid if zeros is None else zeros.float().unsqueeze(-1)
    return ((groups - zero) * wide).reshape(W_q.shape)


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized (N, K) weight, w[n, k] = (W_q[n, k] - zeros[n, k // group_size]) * scales[n, k // group_size].

    Of a table scheme it is values[W_q[n, k]] * (scales[n, k // group_size] * factor): see tables.py.

    Args:
        W_q: (N, K) uint8 codes, 0 .. 2**bits - 1.
        scales: (N, K // group_size) fp16, bf16 or fp32, in weight units; uint8 where the scheme's are of 8 bits.
        zeros: (N, K // group_size) in code units, any float dtype; None means the constant `scheme.mid`.
        bits, group_size: the scheme; group_size = K is per channel.
        zero: "float" or "int"; by default "float" where zeros are given and "none" where not.
        table: fp32 (T, 2**bits), a fitted table, or (T, 1), the factor of e4m3 scales; None for other schemes.
        table_kind, scale, block_rows: the scheme's `table`, `scale` and `block_rows`, by which the rows of scales are fewer.
    Raises:
        SchemeError: shapes, dtypes or codes that do not fit the scheme.
    """

    W_q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    zero: ZeroKind | None = None
    table: torch.Tensor | None = None
    table_kind: str = ""
    scale: ScaleKind = "float"
    block_rows: int = 1
    scheme: Scheme = field(init=False)

    def __post_init__(self) -> None:
        kind: ZeroKind = self.zero or ("none" if self.zeros is None else "float")
        object.__setattr__(self, "zero", kind)
        of_values = self.table_kind, self.scale, self.block_rows
        object.__setattr__(self, "scheme", Scheme(self.bits, self.group_size, kind, *of_values))
        if self.W_q.dim() != 2 or self.W_q.dtype != torch.uint8:
            raise SchemeError(f"W_q must be (N, K) uint8, got {tuple(self.W_q.shape)} {self.W_q.dtype}")
        N, K = self.W_q.shape
        expected = scale_shape((N, 0), (self.block_rows, 1))[0], self.scheme.groups(K)
        if (self.zeros is None) != (kind == "none"):
            raise SchemeError(f'zero="{kind}" and zeros={"None" if self.zeros is None else "a tensor"} contradict each other')
        for name, t in (("scales", self.scales), ("zeros", self.zeros)):
            right = t is None or (t.dtype == torch.uint8 if self.scale in tables.BYTES else t.is_floating_point())
            if t is not None and (tuple(t.shape) != expected or not right):
                kind_of_scale = "uint8" if self.scale in tables.BYTES else "float"
                raise SchemeError(f"{name} must be {expected} {kind_of_scale} for W_q {(N, K)}, got {tuple(t.shape)} {t.dtype}")
        tables.check_shape(self.scheme, self.table, N)
        if self.bits < 8 and self.W_q.numel() and int(self.W_q.max()) >= self.scheme.levels:
            raise SchemeError(f"W_q holds code {int(self.W_q.max())}; {self.bits} bits end at {self.scheme.levels - 1}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out_features, in_features."""
        return self.W_q.shape[0], self.W_q.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dequantized (N, K) weight, computed in fp32 and rounded once to `dtype` (None: not rounded)."""
        return dequantized(self.scheme, self.W_q, self.scales, self.zeros, self.table).to(dtype or torch.float32)

    @property
    def wide_scales(self) -> torch.Tensor:
        """(N, K // group_size) fp32: the scales times their factor."""
        return tables.wide(self.scheme, self.scales, self.table)

    @classmethod
    def of(
        cls, s: Scheme, W_q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, table: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """The tensor of a scheme."""
        return cls(W_q, scales, zeros, s.bits, s.group_size, s.zero, table, s.table, s.scale, s.block_rows)

    def rows(self, first: int, last: int) -> QuantizedTensor:
        """Rows first .. last - 1, whole blocks of them: views."""
        (N, _), part, r = self.shape, slice(first, last), self.block_rows
        zeros = None if self.zeros is None else self.zeros[part]
        table = tables.rows_of(self.table, N, first, min(last, N))
        return QuantizedTensor.of(self.scheme, self.W_q[part], self.scales[first // r : -(-last // r)], zeros, table)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same tensor on another device."""
        zeros, table = (None if t is None else t.to(device) for t in (self.zeros, self.table))
        return QuantizedTensor.of(self.scheme, self.W_q.to(device), self.scales.to(device), zeros, table)

    def held(self, dtype: torch.dtype) -> QuantizedTensor:
        """The same with its scales and zeros in another float dtype; scales of 8 bits and tables stay."""
        scales = self.scales.to(dtype) if self.scale == "float" else self.scales
        return QuantizedTensor.of(
            self.scheme, self.W_q, scales, None if self.zeros is None else self.zeros.to(dtype), self.table
        )
