"""gptq's inner loop: rounds the columns of a block one after another, and adds each error to the later columns.

On CUDA `round_block` is one launch of round_block_triton.py if Triton is installed; elsewhere torch, six small ops per column.
`carry` is the same loop for any choice of codes, e.g. of a table.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from lowq_kernels.optional import optional


class RoundBlock(Protocol):
    """A function that rounds a block: see `round_block`."""

    def __call__(
        self, block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def round_block(
    block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a block's columns (R, B), integers in fp32, and their errors (R, B), scaled as later columns must correct them.

    Args:
        block: (R, B) fp32, the columns with earlier errors added; not changed. Any R and B.
        factor: (B, B) upper triangular, of the inverse moments.
        scales, zeros: (R,) of the group that the block lies in. levels: codes are 0 .. levels - 1.
    Returns:
        the same codes on every run; CPU and GPU differ where a value lies within fp32 rounding of the middle of two codes.
    """
    return implementation(block.device.type)(block, factor, scales, zeros, levels)


@cache
def implementation(device: str) -> RoundBlock:
    """The function that rounds a block on a device of this type."""
    if device != "cuda":
        return round_block_torch
    triton = optional("lowq_kernels.gptq.round_block_triton", "triton")
    return triton.round_block_triton if triton else round_block_torch


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
    """As `round_block`. nearest: column (R,) -> its codes, and their values."""
    left = block.T.contiguous()  # a column is then contiguous
    codes, errors = torch.empty_like(left), torch.empty_like(left)
    weight = (1 / factor.diagonal()).tolist()
    for i in range(left.shape[0]):
        codes[i], values = nearest(left[i])
        torch.sub(left[i], values, out=errors[i])
        errors[i].mul_(weight[i])
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return codes.T, errors.T
