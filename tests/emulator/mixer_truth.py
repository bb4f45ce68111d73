"""Mixers of every kind and size that tests compute, and what their steps and runs are: loops over tokens and heads in fp64."""

import torch
from mixers import a_delta, a_mamba2, state_shapes
from torch.nn import functional as F

from lowq_kernels.decode.recurrent import delta, mamba2, short_conv
from lowq_kernels.decode.recurrent.delta import Delta
from lowq_kernels.decode.recurrent.mamba2 import Mamba2
from lowq_kernels.decode.recurrent.short_conv import ShortConv

SLOTS = 5
CASES = {
    "delta": a_delta,
    "delta, grouped": lambda: a_delta(grouped=True),
    "delta, odd sizes": lambda: a_delta(3, 9, 5, 7, 3, True, True),
    "delta, a key head each": lambda: a_delta(4, 4, 8, 8, 2),
    "mamba2": a_mamba2,
    "mamba2, gate last": lambda: a_mamba2(gate_last=True),
    "mamba2, no norm": lambda: a_mamba2(norm=False, bias=False),
    "mamba2, constants": lambda: a_mamba2(6, 5, 3, 7, 3, scales=(0.5, 1.7, 0.6, 1.3, 0.8)),
    "mamba2, limits of dt": lambda: a_mamba2(dt=(0.4, 0.9)),
    "short_conv": lambda: ShortConv(torch.randn(20, 3), torch.randn(20)),
    "short_conv, wide": lambda: ShortConv(torch.randn(9, 5), None),
    "short_conv of one token": lambda: ShortConv(torch.randn(9, 1), None),
}


def kind(f):
    return {Delta: delta, Mamba2: mamba2, ShortConv: short_conv}[type(f)]


def states(f, slots=SLOTS):
    """Of new sequences."""
    return {name: torch.zeros(slots, *shape) for name, shape in state_shapes(f).items()}


def convolved(x, f, t):
    """Of inputs x (T, C) fp64 the convolution at token t."""
    y = torch.zeros(x.shape[1], dtype=torch.float64)
    for i in range(f.weight.shape[1]):
        at = t - (f.weight.shape[1] - 1) + i
        y += f.weight[:, i].double() * (x[at] if at >= 0 else 0)
    return y if f.bias is None else y + f.bias.double()


def rms(y, norm):
    parts = y.reshape(norm.groups, -1)
    return (parts / (parts.square().mean(-1, keepdim=True) + norm.eps).sqrt()).reshape(-1) * norm.weight.double()


def truth_delta(x, f):
    """A loop over tokens and heads in fp64."""
    per, C = f.v_heads // f.k_heads, f.weight.shape[0]
    if f.grouped:
        each = 2 * f.k_dim + 2 * per * f.v_dim
        by_head = [
            x[:, h * each : (h + 1) * each].split((f.k_dim, f.k_dim, per * f.v_dim, per * f.v_dim), 1) for h in range(f.k_heads)
        ]
        q, k, v, z = (torch.cat([head[i] for head in by_head], 1) for i in range(4))
        ba = [x[:, f.k_heads * each + 2 * per * h :][:, : 2 * per] for h in range(f.k_heads)]
        b, a = torch.cat([t[:, :per] for t in ba], 1), torch.cat([t[:, per:] for t in ba], 1)
        mixed = torch.cat((q, k, v), 1)
    else:
        mixed, z, b, a = x.split((C, f.v_heads * f.v_dim, f.v_heads, f.v_heads), 1)
    S, ys = [torch.zeros(f.k_dim, f.v_dim, dtype=torch.float64) for _ in range(f.v_heads)], []
    for t in range(x.shape[0]):
        c, y = F.silu(convolved(mixed, f, t)), []
        for h in range(f.v_heads):
            q, k = (c[s:][h // per * f.k_dim :][: f.k_dim] for s in (0, f.k_heads * f.k_dim))
            q, k = (u / (u.square().sum() + 1e-6).sqrt() for u in (q, k))
            v = c[2 * f.k_heads * f.k_dim + h * f.v_dim :][: f.v_dim]
            S[h] = S[h] * torch.exp(-f.a_log[h].double().exp() * F.softplus(a[t, h] + f.dt_bias[h].double()))
            S[h] = S[h] + torch.outer(k, torch.sigmoid(b[t, h]) * (v - S[h].T @ k))
            y.append(rms(S[h].T @ q / f.k_dim**0.5, f.norm) * F.silu(z[t, h * f.v_dim :][: f.v_dim]))
        ys.append(torch.cat(y))
    return torch.stack(ys)


def truth_mamba2(x, f):
    inner, BC = f.heads * f.dim, f.groups * f.N
    z, u, B, C, dt = (t * s for t, s in zip(x.split((inner, inner, BC, BC, f.heads), 1), f.scales, strict=True))
    mixed, S, ys = torch.cat((u, B, C), 1), torch.zeros(f.heads, f.dim, f.N, dtype=torch.float64), []
    for t in range(x.shape[0]):
        c, y = F.silu(convolved(mixed, f, t)), []
        for h in range(f.heads):
            u, g = c[h * f.dim :][: f.dim], h // (f.heads // f.groups)
            B, C = (c[start + g * f.N :][: f.N] for start in (inner, inner + BC))
            step = F.softplus(dt[t, h] + f.dt_bias[h].double()).clamp(*f.dt)
            S[h] = S[h] * torch.exp(-step * f.a_log[h].double().exp()) + torch.outer(step * u, B)
            y.append(S[h] @ C + f.d[h].double() * u)
        y, gate = torch.cat(y), F.silu(z[t])
        ys.append(y * gate if f.norm is None else rms(y, f.norm) * gate if f.gate_last else rms(y * gate, f.norm))
    return torch.stack(ys)


def truth(x, f):
    x = x.double()
    if isinstance(f, ShortConv):
        B, C, u = x.chunk(3, 1)
        return torch.stack([C[t] * convolved(B * u, f, t) for t in range(x.shape[0])])
    return truth_delta(x, f) if isinstance(f, Delta) else truth_mamba2(x, f)
