"""torch.ops.lowq.linear: the one door through which compiled graphs reach the kernels.

A custom op with a fake, so torch.compile traces past it without a graph break and CUDA graphs capture what it launches.
Eager calls skip it (QuantLinear calls `registry.matmul`): the dispatcher costs 15 to 20 us a call on a CPU core.
"""

import torch

from lowq_kernels.activations import check_act
from lowq_kernels.registry import matmul
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import Scheme


@torch.library.custom_op("lowq::linear", mutates_args=())
def linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    aux: torch.Tensor | None,
    bias: torch.Tensor | None,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    zero: str,
    layout: str,
    kernel: str | None,
    act: str = "none",
) -> torch.Tensor:
    """x (M, K), its rows rounded to 8 bits where `act` says so, @ dequantize(words, scales, zeros)^T + bias -> (M, N)."""
    scheme = Scheme(bits, group_size, zero)  # type: ignore[arg-type]
    return matmul(x, PackedWeight(words, scales, zeros, scheme, N, K, layout, aux), bias, kernel, check_act(act))


@linear.register_fake
def _(x, words, scales, zeros, aux, bias, N, K, bits, group_size, zero, layout, kernel, act="none"):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], N)
