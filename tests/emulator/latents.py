"""Latent attention of random weights, and the checks of its kernels."""

import torch

from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import PositionScale

DEVICE, EPS = "cuda" if torch.cuda.is_available() else "cpu", 1e-5
# heads, nope, rotated, v_dim, rank
SHAPES = {"as published, in small": (16, 16, 8, 16, 32), "odd": (3, 5, 2, 7, 9), "many heads": (20, 24, 16, 100, 80)}
FACTS = {
    "neighbours": {"pairing": "neighbours"}, "halves": {"pairing": "halves"},
    "scale of positions": {"position_scale": PositionScale(0.4, 7.0, 1)}, "layer norm": {"kind": "layer"},
}  # fmt: skip
DTYPES = {torch.float16: 2e-3, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}  # errors of outputs


def randn(*shape, dtype):
    return torch.randn(*shape).to(DEVICE, dtype)


def facts(shape, dtype, kind="rms", **more):
    heads, nope, _, v_dim, rank = shape
    bias = randn(rank, dtype=torch.float32) if kind == "layer" else None
    own = Norm(randn(rank, dtype=torch.float32), EPS, kind, bias)
    ups = (randn(heads, n, rank, dtype=torch.float32).mul(rank**-0.5).to(dtype) for n in (nope, v_dim))
    return Latent(*shape, 0.3, *ups, own, **more)


def rotated(x, cos, sin, pairing):
    """One vector, pair by pair."""
    y, half = x.clone(), len(x) // 2
    for i in range(half):
        a, b = (i, i + half) if pairing == "halves" else (2 * i, 2 * i + 1)
        y[a], y[b] = x[a] * cos[i] - x[b] * sin[i], x[b] * cos[i] + x[a] * sin[i]
    return y


def truth(q, rows, start, turned, f):
    """Not absorbed, a loop in fp64: q and rows (n, ...) of a whole text -> y of the tokens from `start` on."""
    cos, sin = (t.double() for t in turned)
    q, rows = q.double().unflatten(1, (f.heads, -1)), rows.double()
    held = []
    for t, row in enumerate(rows):
        c = row[: f.rank]
        c = c - c.mean() if f.norm.kind == "layer" else c
        c = c / (c.square().mean() + f.norm.eps).sqrt() * f.norm.weight.double()
        c = c if f.norm.bias is None else c + f.norm.bias.double()
        held.append((c, rotated(row[f.rank :], cos[t], sin[t], f.pairing)))
    y = torch.zeros(len(q), f.heads, f.v_dim, dtype=torch.float64, device=q.device)
    for h in range(f.heads):
        keys = torch.stack([torch.cat((f.k_up[h].double() @ c, k)) for c, k in held])
        values = torch.stack([f.v_up[h].double() @ c for c, _ in held])
        for t in range(start, len(q)):
            scale = f.position_scale
            by = 1 + scale.beta * torch.log(torch.tensor(1.0 + (t + scale.offset) // scale.period)) if scale else 1
            own = torch.cat((q[t, h, : f.nope], rotated(q[t, h, f.nope :], cos[t], sin[t], f.pairing))) * by
            y[t, h] = (f.scale * keys[: t + 1] @ own).softmax(0) @ values[: t + 1]
    return y[start:].flatten(1)
