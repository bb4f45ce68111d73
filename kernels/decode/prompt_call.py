"""PromptCall: attention of many tokens over a cache that holds their keys and values already (op "prompt")."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.dispatch.registry import Op

Sizes = tuple[int, int, int, int]  # T, start, slots of a cache or of one of its blocks, blocks that a table names


@dataclass(frozen=True)
class PromptCall:
    """M tokens with heads of D dims.

    page: slots of a block of a paged cache, 0 where each sequence has a cache of its own. kv: what it is held in (`kv.KINDS`).
    Its kernels are launch(y, k_cache, v_cache, packed, heads, sizes, config) -> y (M, HQ * D), which has the queries before:
    normed, turned and, over codes, Hadamard's. packed None: T tokens of each sequence, from slot `start` on. beyond: of
    `Heads`, which a kernel has to know.
    """

    op: ClassVar[Op] = "prompt"
    M: int
    D: int
    page: int
    kv: str
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    beyond: tuple[str, ...] = ()
