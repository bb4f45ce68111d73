"""Activations of MLPs in torch, gated or not: fp32 inside, rounded once to the dtype of the output."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

CLAMPED = "clamped_swiglu"  # gpt-oss's activation, a function of gate and up together
LIMIT, STEEPNESS = 7.0, 1.702  # constants of CLAMPED
UNGATED = "ungated "  # prefix of an activation's name: experts without a gate compute act(up) alone

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activated(x: torch.Tensor, act: str, by: torch.Tensor | None = None) -> torch.Tensor:
    """act(x), for an MLP without a gate, or act(x) * by, all (M, N). act: one of ACTIVATIONS."""
    y = ACTIVATIONS[act](x.float())
    return (y if by is None else y * by.float()).to(x.dtype)


def xielu(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """xIELU of x (M, N), with learnt scalars (1,): a parabola above 0, an exponential below. Source: arXiv:2411.13010."""
    y, p, n, b = x.float(), F.softplus(alpha_p.float()), beta.float() + F.softplus(alpha_n.float()), beta.float()
    below = (torch.expm1(torch.minimum(y, eps.float())) - y) * n
    return (torch.where(y > 0, p * y * y, below) + b * y).to(x.dtype)


def gated(gate_up: torch.Tensor, act: str, gate_scale: float = 1.0) -> torch.Tensor:
    """act(gate_scale * gate) * up for (M, 2 I) = gate, up side by side -> (M, I). act: one of ACTIVATIONS, or gpt-oss's
    "clamped_swiglu": gate * sigmoid(1.702 gate) * (up + 1), gate at most 7 and up within 7."""
    gate, up = gate_up.float().chunk(2, -1)
    if gate_scale != 1.0:
        gate = gate * gate_scale
    if act == CLAMPED:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)).to(gate_up.dtype)
    return (ACTIVATIONS[act](gate) * up).to(gate_up.dtype)


def opened(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y * sigmoid(gate), both (M, N), or gate (M, 1): the output of gated attention, or of a shared expert with a gate."""
    return (y.float() * torch.sigmoid(gate.float())).to(y.dtype)


def softcapped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) in fp32: logits that are bounded."""
    return cap * torch.tanh(x.float() / cap)


def opened_by(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y * sigmoid(x w^T), y (M, N), x (M, H), w (1, H): the output of a shared expert whose gate is a product of its own."""
    return opened(y, F.linear(x, weight))
