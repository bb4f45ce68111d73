"""Recurrent mixers of random weights (gated delta and Mamba2), and the checks of any of them."""

import torch

from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent.delta import Delta
from lowq_kernels.decode.recurrent.mamba2 import Mamba2
from lowq_kernels.decode.recurrent.short_conv import ShortConv

EPS = 1e-5


def a_delta(k_heads=2, v_heads=4, k_dim=16, v_dim=24, width=4, grouped=False, bias=False, kind="rms"):
    C = 2 * k_heads * k_dim + v_heads * v_dim
    a_log = torch.rand(v_heads).mul(16).add(0.01).log()
    own = Norm(torch.randn(v_dim), EPS, kind, torch.randn(v_dim) if kind == "layer" else None)
    return Delta(
        k_heads, v_heads, k_dim, v_dim, grouped, torch.randn(C, width) / 2, torch.randn(C) if bias else None, a_log,
        torch.randn(v_heads) - 3, own,
    )  # fmt: skip


def a_mamba2(heads=4, dim=8, groups=2, N=12, width=4, bias=True, norm=True, **more):
    C = heads * dim + 2 * groups * N
    weight = Norm(torch.randn(heads * dim), EPS, groups=groups) if norm else None
    return Mamba2(
        heads, dim, groups, N, torch.randn(C, width) / 2, torch.randn(C) if bias else None, torch.rand(heads).mul(9).log(),
        torch.randn(heads), torch.randn(heads), weight, **more,
    )  # fmt: skip


def features(f):
    if isinstance(f, Delta):
        return 2 * f.k_heads * f.k_dim + 2 * f.v_heads * f.v_dim + 2 * f.v_heads
    return f.heads * f.dim + f.weight.shape[0] + f.heads if isinstance(f, Mamba2) else 3 * f.weight.shape[0]


def state_shapes(f):
    """Of one sequence, by name."""
    shapes = {"conv": (f.weight.shape[0], f.weight.shape[1] - 1)}
    if not isinstance(f, ShortConv):
        shapes["S"] = (f.v_heads, f.k_dim, f.v_dim) if isinstance(f, Delta) else (f.heads, f.dim, f.N)
    return shapes
