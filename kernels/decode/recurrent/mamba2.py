"""Mamba2: S <- exp(dt A) S + dt x B^T, y = S C + D x; y is gated by z and normed. In torch and fp32.

A run is computed in chunks: effects of a chunk's tokens on one another are matrix products.
Source: Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from lowq_kernels.decode import norms
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import CHUNK, SEGMENT, Mixer, States, chunked, conv, decays, put, taken, unchunked
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Op, capability, register


@dataclass(frozen=True)
class Mamba2Call:
    """A step of M sequences, or a `run` of M tokens of one; width: of the convolution. Kernels: see `recurrent.dispatched`."""

    op: ClassVar[Op] = "mamba2"
    M: int
    run: bool
    heads: int
    dim: int
    groups: int
    N: int
    width: int
    norm: bool
    gate_last: bool
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Mamba2:
    """Rows of x: z (heads dim), x (heads dim), B, C (groups N each), dt (heads); and weights. C = heads dim + 2 groups N.

    weight (C, W), bias (C,) or None: of the convolution over x, B, C. a_log, dt_bias, d (heads,). norm: over all values of y.
    scales: constants of z, x, B, C, dt. gate_last: y is normed, then multiplied by silu(z), else the other way round.
    dt: least and largest value of dt. States: "conv" (slots, C, W - 1) before the constants, "S" (slots, heads, dim, N) fp32.
    """

    heads: int
    dim: int
    groups: int
    N: int
    weight: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    norm: Norm | None
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    gate_last: bool = False
    dt: tuple[float, float] = (0.0, float("inf"))

    def call(self, x: torch.Tensor, run: bool) -> Mamba2Call:
        """The call of x."""
        sizes = (self.heads, self.dim, self.groups, self.N, self.weight.shape[1], self.norm is not None, self.gate_last)
        return Mamba2Call(x.shape[0], run, *sizes, x.dtype, x.device.type, capability(x.device))


def step(x: torch.Tensor, f: Mamba2, states: States, slots: torch.Tensor) -> torch.Tensor:
    """See the package docstring."""
    z, mixed, dt, g = _parted(x, f)
    u, B, C = _heads(conv.step(mixed, _weight(f), f.bias, states["conv"], slots), f)
    B, C = (t.repeat_interleave(f.heads // f.groups, 1)[..., None, :] for t in (B, C))
    S = taken(states["S"], slots).mul_(g.exp()[..., None, None]).addcmul_((dt[..., None] * u)[..., None], B)
    put(states["S"], slots, S)
    return _out((S * C).sum(-1), u, z, f, x.dtype)


def run(x: torch.Tensor, f: Mamba2, states: States, slot: int) -> torch.Tensor:
    """See the package docstring."""
    return torch.cat([_segment(part, f, states, slot) for part in x.split(SEGMENT)])


def _segment(x: torch.Tensor, f: Mamba2, states: States, slot: int) -> torch.Tensor:
    T, size, each = x.shape[0], min(CHUNK, x.shape[0]), f.heads // f.groups
    z, mixed, dt, g = _parted(x, f)
    u, B, C = _heads(conv.run(mixed, _weight(f), f.bias, states["conv"], slot), f)
    new, B, C, g = (chunked(t, size) for t in (dt[..., None] * u, B, C, g))
    of_begin, to_end, between = decays(g)
    inside = (C @ B.transpose(-1, -2)).repeat_interleave(each, 0) * between
    y = inside @ new
    B, C = (t.repeat_interleave(each, 0) for t in (B, C))
    written = (new * to_end[..., None]).transpose(-1, -2) @ B
    S = states["S"][slot].float()
    for i in range(y.shape[1]):
        y[:, i] += of_begin[:, i, :, None] * (C[:, i] @ S.transpose(-1, -2))
        S = S * of_begin[:, i, -1, None, None] + written[:, i]
    states["S"][slot] = S.to(states["S"].dtype)
    return _out(unchunked(y, T), u, z, f, x.dtype)


def _parted(x: torch.Tensor, f: Mamba2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """z (M, heads dim), x, B, C side by side (M, C), dt and the decay in log space (M, heads) fp32."""
    z, mixed, dt = x.split((f.heads * f.dim, f.weight.shape[0], f.heads), 1)
    dt = F.softplus(dt.float() * f.scales[4] + f.dt_bias.float()).clamp(*f.dt)
    return z.float() * f.scales[0], mixed, dt, dt * -f.a_log.float().exp()


def _weight(f: Mamba2) -> torch.Tensor:
    """The convolution's weight times the constants of its inputs."""
    if f.scales[1:4] == (1.0, 1.0, 1.0):
        return f.weight
    x, B, C = f.weight.float().split((f.heads * f.dim, f.groups * f.N, f.groups * f.N))
    return torch.cat((x * f.scales[1], B * f.scales[2], C * f.scales[3]))


def _heads(mixed: torch.Tensor, f: Mamba2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, heads, dim), B and C (M, groups, N) of what the convolution gave."""
    x, B, C = F.silu(mixed).split((f.heads * f.dim, f.groups * f.N, f.groups * f.N), 1)
    return x.unflatten(1, (f.heads, f.dim)), B.unflatten(1, (f.groups, f.N)), C.unflatten(1, (f.groups, f.N))


def _out(y: torch.Tensor, u: torch.Tensor, z: torch.Tensor, f: Mamba2, dtype: torch.dtype) -> torch.Tensor:
    """y (M, heads, dim) without D x -> the output (M, heads dim)."""
    y, gate = (y + f.d.float()[:, None] * u).flatten(1), F.silu(z)
    if f.norm is not None and f.gate_last:
        return (norms.in_fp32(y, f.norm) * gate).to(dtype)
    return (y * gate if f.norm is None else norms.in_fp32(y * gate, f.norm)).to(dtype)


DEFINITION = Mixer(step, run)
register("torch/mamba2", op="mamba2", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)(
    DEFINITION.either
)
