"""Layers of 16-bit weights: a head that decoding reads whole at every step, a model that is not quantized."""

import torch
from torch import nn

from lowq_kernels.dispatch.registry import FLOATS, Choice, find
from lowq_kernels.products.cpu import dense as cpu
from lowq_kernels.products.dense_call import DenseCall

MOST_ROWS = 8  # max. rows for lowq's kernels on a GPU; more rows run in cuBLAS


class Dense(nn.Linear):
    """A linear layer by `product`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N)."""
        if x.dim() == 2:  # without a view that would keep a CPU's step from being recorded (`repeated.Repeated`)
            return product(x, self.weight, self.bias)
        return product(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """layer(x), by `product` if the layer is an nn.Linear; x (M, K)."""
    return product(x, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else layer(x)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) @ weight (N, K).T + bias (N,), all of one dtype and device, by lowq's kernels or by torch."""
    if x.device.type == "cpu":
        return cpu.product(x, weight, bias)
    plain = x.dtype == weight.dtype and weight.is_contiguous() and not weight.data_ptr() % 16
    plain = plain and not x.requires_grad and not torch.compiler.is_compiling()
    if plain and (found := choice(DenseCall.of(x.shape[0], weight))):
        spec, config = found
        return spec.launch(x.contiguous(), weight, bias, config)
    return nn.functional.linear(x, weight, bias)


def choice(call: DenseCall) -> Choice | None:
    """The kernel and config of a product; None if torch computes it."""
    return find(call) if 0 < call.M <= MOST_ROWS and call.dtype in FLOATS else None
