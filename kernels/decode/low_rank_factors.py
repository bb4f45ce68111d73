"""The factors of LoRA adapters for one product."""

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, eq=False)
class LowRank:
    """The factors of all adapters for one product, whose parts (q, k and v, say) lie one after another in its columns.

    A (S, P, R, K), B (S, N, R). ends: the column behind each of the P parts. blocks (blocks, 3) int32, on the device: first
    column, column behind the last and part of every BLOCK_N columns, none of which lies in two parts.
    """

    A: torch.Tensor
    B: torch.Tensor
    ends: tuple[int, ...]
    blocks: torch.Tensor

    BLOCK_N = 128

    @classmethod
    def of(cls, A: torch.Tensor, B: torch.Tensor, ends: tuple[int, ...]) -> "LowRank":
        """With the table of blocks."""
        rows = [
            (first, min(first + cls.BLOCK_N, end), p)
            for p, (begin, end) in enumerate(pairwise((0, *ends)))
            for first in range(begin, end, cls.BLOCK_N)
        ]
        return cls(A, B, ends, torch.tensor(rows, dtype=torch.int32, device=A.device))


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Rows times A, of each row's adapter, before the sum over shares of their columns.

    t (M, P, R, shares) fp32.
    """

    t: torch.Tensor
    shares: int
