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
