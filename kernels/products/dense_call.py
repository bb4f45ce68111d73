"""Operation "dense": a product by a weight in 16 bits that is not packed."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.dispatch.registry import Op
from lowq_kernels.gpu import capability


@dataclass(frozen=True)
class DenseCall:
    """y (M, N) = x (M, K) @ W (N, K)^T, all in one 16-bit dtype, W row by row.

    Its kernels are launch(x, weight, bias, config) -> y: x and weight contiguous, bias (N,) or None.
    """

    op: ClassVar[Op] = "dense"
    M: int
    N: int
    K: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, M: int, weight: torch.Tensor) -> "DenseCall":
        """The call of M rows by weight (N, K)."""
        N, K = weight.shape
        return cls(M, N, K, weight.dtype, weight.device.type, capability(weight.device))
