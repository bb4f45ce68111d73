"""Gated delta: S <- exp(g) S + k (beta (v - exp(g) S^T k))^T, y = S^T q; y is normed and gated. In torch and fp32.

A run is computed in chunks. The updates of a chunk's tokens depend on one another by a triangular system, which is solved for
all chunks at once; the rest are matrix products. Source: Gated Delta Networks (Yang et al. 2024, arXiv:2412.06464).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from lowq_kernels.decode import norms
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import SEGMENT, Mixer, States, chunked, conv, decays, put, taken, unchunked
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Op, capability, register

EPS = 1e-6  # of the normalisation of q and k to length 1
PART = 32  # tokens per chunk: 1,000 tokens with 32 heads of 128 dims take 262 ms on a CPU core, 333 ms with chunks of 64


@dataclass(frozen=True)
class DeltaCall:
    """A step of M sequences, or a `run` of M tokens of one; width: of the convolution. Kernels: see `recurrent.dispatched`."""

    op: ClassVar[Op] = "delta"
    M: int
    run: bool
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int
    grouped: bool
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Delta:
    """Rows of x, and weights. C = 2 k_heads k_dim + v_heads v_dim.

    Rows: q, k, v, z (v_heads v_dim), b, a (v_heads each); grouped: q, k, v, z of each key head together, then b, a of each.
    weight (C, W), bias (C,) or None: of the convolution over q, k, v. a_log, dt_bias (v_heads,). norm: over the v_dim values of
    a head; its output is multiplied by silu(z). States: "conv" (slots, C, W - 1), "S" (slots, v_heads, k_dim, v_dim) fp32.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    grouped: bool
    weight: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: Norm

    def call(self, x: torch.Tensor, run: bool) -> DeltaCall:
        """The call of x."""
        sizes = (self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.weight.shape[1], self.grouped)
        return DeltaCall(x.shape[0], run, *sizes, x.dtype, x.device.type, capability(x.device))


def step(x: torch.Tensor, f: Delta, states: States, slots: torch.Tensor) -> torch.Tensor:
    """See the package docstring."""
    mixed, z, beta, g = _parted(x, f)
    q, k, v = _heads(conv.step(mixed, f.weight, f.bias, states["conv"], slots), f)
    S = taken(states["S"], slots).mul_(g.exp()[..., None, None])
    written = (v[..., None, :] - k[..., None, :] @ S) * beta[..., None, None]
    S.addcmul_(k[..., None], written)
    put(states["S"], slots, S)
    return _out((q[..., None, :] @ S)[..., 0, :], z, f, x.dtype)


def run(x: torch.Tensor, f: Delta, states: States, slot: int) -> torch.Tensor:
    """See the package docstring."""
    return torch.cat([_segment(part, f, states, slot) for part in x.split(SEGMENT)])


def _segment(x: torch.Tensor, f: Delta, states: States, slot: int) -> torch.Tensor:
    T, size = x.shape[0], min(PART, x.shape[0])
    mixed, z, beta, g = _parted(x, f)
    heads = _heads(conv.run(mixed, f.weight, f.bias, states["conv"], slot), f)
    q, k, v, beta, g = (chunked(t, size) for t in (*heads, beta, g))
    of_begin, to_end, between = decays(g)
    by = beta[..., None]
    system = (by * k) @ k.transpose(-1, -2) * between
    right_side = torch.cat((by * v, by * k * of_begin[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    new, reads = solved.split((f.v_dim, f.k_dim), -1)  # what tokens would write into no state, and what they read of one
    inside = q @ k.transpose(-1, -2) * between
    q, k = q * of_begin[..., None], (k * to_end[..., None]).transpose(-1, -2)
    S, y = states["S"][slot].float(), torch.empty_like(v)
    for i in range(v.shape[1]):
        written = new[:, i] - reads[:, i] @ S
        y[:, i] = q[:, i] @ S + inside[:, i] @ written
        S = S * of_begin[:, i, -1, None, None] + k[:, i] @ written
    states["S"][slot] = S.to(states["S"].dtype)
    return _out(unchunked(y, T), z, f, x.dtype)


def _parted(x: torch.Tensor, f: Delta) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v side by side (M, C), z (M, v_heads, v_dim), beta and the decay in log space (M, v_heads) fp32."""
    M, values, each = x.shape[0], f.v_heads * f.v_dim, f.v_heads // f.k_heads
    if f.grouped:
        wide = 2 * f.k_heads * f.k_dim + 2 * values
        qkvz, ba = x[:, :wide].reshape(M, f.k_heads, -1), x[:, wide:].reshape(M, f.k_heads, 2 * each)
        *qkv, z = qkvz.split((f.k_dim, f.k_dim, each * f.v_dim, each * f.v_dim), -1)
        mixed = torch.cat([t.reshape(M, -1) for t in qkv], 1)
        b, a = (t.reshape(M, f.v_heads) for t in ba.split(each, -1))
    else:
        mixed, z, b, a = x.split((f.weight.shape[0], values, f.v_heads, f.v_heads), 1)
    g = -f.a_log.float().exp() * F.softplus(a.float() + f.dt_bias.float())
    return mixed, z.reshape(M, f.v_heads, f.v_dim), b.float().sigmoid(), g


def _heads(mixed: torch.Tensor, f: Delta) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k (M, v_heads, k_dim) of length 1, q then over k_dim^0.5, v (M, v_heads, v_dim), of what the convolution gave."""
    keys = f.k_heads * f.k_dim
    q, k, v = F.silu(mixed).split((keys, keys, f.v_heads * f.v_dim), 1)
    q, k = (t.unflatten(1, (f.k_heads, f.k_dim)) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
    q, k = (t.repeat_interleave(f.v_heads // f.k_heads, 1) for t in (q * f.k_dim**-0.5, k))
    return q, k, v.unflatten(1, (f.v_heads, f.v_dim))


def _out(y: torch.Tensor, z: torch.Tensor, f: Delta, dtype: torch.dtype) -> torch.Tensor:
    return (norms.in_fp32(y, f.norm) * F.silu(z.float())).flatten(1).to(dtype)


DEFINITION = Mixer(step, run)
register("torch/delta", op="delta", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)(
    DEFINITION.either
)
