"""Matrices of 8-bit floats (e4m3) with scales: the one definition of what they mean, in torch, on any device.

A matrix (M, K) is cut into blocks of block[0] rows by block[1] columns (a last one may be partial); each has one fp32 scale
and `x ~ q * scale`. 1 x 128: groups of a token, for activations. 128 x 128 and 256 x 256: for weights (GridQuant: for both).
1 x K: per token or channel. Kernels quantize to the same bits and multiply what this file says.
"""

from dataclasses import dataclass

import torch

from lowq_packers.errors import SchemeError
from lowq_packers.scheme import Block, scale_shape

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST = 1e-30  # the least maximum that a scale is made of: 448 / LEAST is finite, and zeros stay zeros
SLAB = 1 << 24  # values in fp32 at a time


@dataclass(frozen=True)
class Fp8Matrix:
    """q (M, K) e4m3, scales fp32 (ceil(M / block[0]), ceil(K / block[1])). Raises SchemeError where they do not fit."""

    q: torch.Tensor
    scales: torch.Tensor
    block: Block

    def __post_init__(self) -> None:
        if self.q.dim() != 2 or self.q.dtype != FP8:
            raise SchemeError(f"an fp8 matrix is (M, K) float8_e4m3fn, got {tuple(self.q.shape)} {self.q.dtype}")
        expected = scale_shape(self.q.shape, self.block)
        if tuple(self.scales.shape) != expected or self.scales.dtype != torch.float32:
            shape = f"{tuple(self.scales.shape)} {self.scales.dtype}"
            raise SchemeError(f"blocks of {self.block[0]}x{self.block[1]} need {expected} float32 scales, got {shape}")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The (M, K) values, computed in fp32 and rounded once to `dtype`; SLAB of them at a time."""
        (M, K), (rows, _) = self.q.shape, self.block
        out = torch.empty(M, K, dtype=dtype, device=self.q.device)
        step = max(1, SLAB // max(rows * K, 1))  # rows of blocks
        for i in range(0, self.scales.shape[0], step):
            part = self.q[i * rows : (i + step) * rows]
            out[i * rows : (i + step) * rows] = part.float() * expand_scales(self.scales[i : i + step], self.block, part.shape)
        return out


def expand_scales(scales: torch.Tensor, block: Block, shape: tuple[int, int] | torch.Size) -> torch.Tensor:
    """Scales of blocks -> (M, K), each element's own."""
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def quantize(x: torch.Tensor, block: Block) -> Fp8Matrix:
    """x (M, K) floats in e4m3, scale = largest magnitude of the block / 448. Rounds to nearest, ties to even."""
    M, K = x.shape
    rows, columns = scale_shape(x.shape, block)
    wide = torch.nn.functional.pad(x.float(), (0, columns * block[1] - K, 0, rows * block[0] - M))
    amax = wide.view(rows, block[0], columns, block[1]).abs().amax((1, 3)).clamp(min=LEAST)
    most = torch.full_like(amax, FP8_MAX)  # with a plain number torch would multiply by a rounded reciprocal
    q = x.float() * expand_scales(most / amax, block, x.shape)
    return Fp8Matrix(q.clamp(-FP8_MAX, FP8_MAX).to(FP8), amax / most, block)
