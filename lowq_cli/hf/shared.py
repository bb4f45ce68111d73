"""SharedLinear: a linear layer whose weight is another packed layer's, as in models that use one block at several depths."""

import torch
from torch import nn

from lowq_kernels.modules.linear import QuantLinear


class SharedLinear(nn.Module):
    """Computes with `whole`, which is a module of the model elsewhere: it holds nothing, and nothing of it is saved."""

    def __init__(self, whole: QuantLinear) -> None:
        super().__init__()
        self.__dict__["whole"] = whole  # not a submodule: it is one already

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N)."""
        return self.__dict__["whole"](x)
