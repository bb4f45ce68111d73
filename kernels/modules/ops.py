"""torch.ops.lowq.linear: the op through which compiled graphs and autograd call the kernels.

It is a custom op with a fake implementation, so torch.compile traces it without a graph break, and CUDA graphs capture its
launches. Eager calls skip it (QuantLinear calls `product`), since torch's dispatcher costs 15 to 20 us per call on a
CPU core. If x requires a gradient they use it too: kernels only see addresses, so autograd would take y for a constant.
"""

from typing import Any

import torch

from lowq_kernels.activations import Act, check_act
from lowq_kernels.dispatch.registry import matmul
from lowq_kernels.fp8 import matmul as fp8
from lowq_packers.layouts import PackedWeight, read_facts, unpack


def through_autograd(x: torch.Tensor) -> bool:
    """Whether a product of x must be a torch op: it is being compiled, or x requires a gradient."""
    return torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled())


def product(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, kernel: str | None = None, act: Act = "none"
) -> torch.Tensor:
    """x (M, K) @ dequantize(p)^T + bias -> (M, N) in x's dtype. kernel: as `registry.select` says, of packed weights."""
    if p.scheme.block_rows > 1:
        return fp8.matmul(x, fp8.matrix(p), bias, act)
    return matmul(x, p, bias, kernel, act)


@torch.library.custom_op("lowq::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    aux: torch.Tensor | None,
    bias: torch.Tensor | None,
    facts: str,
    kernel: str | None,
    act: str = "none",
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (M, K), its rows rounded to 8 bits where `act` says so, @ dequantize(W)^T + bias -> (M, N). facts: W's."""
    return product(x, PackedWeight.from_facts(words, scales, zeros, aux, facts, table), bias, kernel, check_act(act))


@linear.register_fake
def _(x, words, scales, zeros, aux, bias, facts, kernel, act="none", table=None):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], read_facts(facts)[1])


@torch.library.custom_op("lowq::linear_gradient", mutates_args=())
def linear_gradient(
    dy: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    aux: torch.Tensor | None,
    table: torch.Tensor | None,
    facts: str,
) -> torch.Tensor:
    """dy (M, N) @ dequantize(W) -> (M, K): the gradient of x, ignoring the rounding of `act`."""
    return dy @ unpack(PackedWeight.from_facts(words, scales, zeros, aux, facts, table)).dequantize(dy.dtype)


@linear_gradient.register_fake
def _(dy, words, scales, zeros, aux, table, facts):  # type: ignore[no-untyped-def]
    return dy.new_empty(dy.shape[0], read_facts(facts)[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:5], inputs[9])
    ctx.facts = inputs[6]


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dx = linear_gradient(dy, *ctx.saved_tensors, ctx.facts) if ctx.needs_input_grad[0] else None
    return dx, *[None] * 4, dy.sum(0) if ctx.needs_input_grad[5] else None, *[None] * 4


linear.register_autograd(_gradients, setup_context=_keep)
