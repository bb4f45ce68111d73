"""gptq's inner loop: a block of columns is rounded one after the other, and each error moved on to those behind it.

`round_block` on CUDA is one launch of round_block_triton.py where Triton is installed; elsewhere torch, six small ops a column.
`carry` is the same loop for any choice of codes: a table's.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from lowq_kernels.optional import optional


class RoundBlock(Protocol):
    """What rounds a block: see `round_block`."""

    def __call__(
        self, block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def round_block(
    block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a block's columns (R, B), whole numbers in fp32, and their errors (R, B) as later columns must make up for them.

    Args:
        block: (R, B) fp32, what is left of the columns; not changed. R and B as they come.
        factor: (B, B) upper triangular, of the inverse moments.
        scales, zeros: (R,) of the group that the block lies in. levels: codes are 0 .. levels - 1.
    Returns:
        the same codes on every run; CPU and GPU differ where a column lies within fp32 rounding of the middle of two codes.
    """
    return _implementation(block.device.type)(block, factor, scales, zeros, levels)


@cache
def _implementation(device: str) -> RoundBlock:
    if device != "cuda":
        return round_block_torch
    found = optional("lowq_kernels.gptq.round_block_triton", "triton")
    return found.round_block_triton if found else round_block_torch


def round_block_torch(
    block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`round_block` on any device."""
    inverse = 1 / scales

    def nearest(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = (column * inverse).add_(zeros).round_().clamp_(0, levels - 1)
        return code, (code - zeros).mul_(scales)

    return carry(block, factor, nearest)


def carry(
    block: torch.Tensor, factor: torch.Tensor, nearest: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_block`. nearest: of a column (R,) its codes, and the values that they stand for."""
    left = block.T.contiguous()  # a column is then contiguous
    codes, errors = torch.empty_like(left), torch.empty_like(left)
    weight = (1 / factor.diagonal()).tolist()
    for i in range(left.shape[0]):
        codes[i], values = nearest(left[i])
        torch.sub(left[i], values, out=errors[i])
        errors[i].mul_(weight[i])
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return codes.T, errors.T
