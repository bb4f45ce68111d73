"""SharedLinear: a linear layer that uses another packed layer's weight, for models that use one block at several depths."""

import torch
from torch import nn

from lowq_kernels.modules.linear import QuantLinear


class SharedLinear(nn.Module):
    """Computes with `whole`, another module of the model. It has no tensors of its own and saves none."""

    def __init__(self, whole: QuantLinear) -> None:
        super().__init__()
        self.__dict__["whole"] = whole  # not registered: it is a submodule elsewhere

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N)."""
        return self.__dict__["whole"](x)
