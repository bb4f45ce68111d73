"""What dispatch knows of a product by an fp8 weight."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels import gpu
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Op
from lowq_kernels.gpu import capability
from lowq_packers.fp8 import Block, Fp8Matrix


@dataclass(frozen=True)
class Fp8Call:
    """y (M, N) = x (M, K) @ W (N, K)^T. Blocks: which values share a scale; x_block None: x in fp16 or bf16.

    Its kernels are launch(x, w, bias, dtype, config) -> y in `dtype`: x an Fp8Matrix or a tensor, w an Fp8Matrix, bias (N,) or
    None.
    """

    op: ClassVar[Op] = "fp8_product"
    M: int
    N: int
    K: int
    x_block: Block | None
    w_block: Block
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, x: Fp8Matrix | torch.Tensor, w: Fp8Matrix, dtype: torch.dtype) -> "Fp8Call":
        """The call of these operands."""
        block, M = (x.block, x.q.shape[0]) if isinstance(x, Fp8Matrix) else (None, x.shape[0])
        N, K = w.q.shape
        return cls(M, N, K, block, w.block, dtype, w.q.device.type, capability(w.q.device))

    @property
    def widens(self) -> bool:
        """Whether 16-bit activations have so many rows that widening the weight for them is worth it."""
        most: int = policy.model("fp8_widened", gpu.of(self.capability))["above_rows"]
        return self.x_block is None and most < self.M
