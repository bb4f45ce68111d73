"""Operation "prompt": attention of many tokens over a cache that already holds their keys and values."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.dispatch.registry import Op
from lowq_packers.scheme import Act

Sizes = tuple[int, int, int, int]  # T, start, slots of a cache or of one of its blocks, blocks that a table names


@dataclass(frozen=True)
class PromptCall:
    """M tokens with heads of D dims.

    page: slots per block of a paged cache, 0 where each sequence has its own contiguous cache. kv: its encoding (`kv.KINDS`).
    Its kernels are launch(y, k_cache, v_cache, packed, heads, sizes, config) -> y (M, HQ * D). On entry y holds the queries:
    normed, rotated and, over a cache of codes, Hadamard-transformed. packed None: T tokens of each sequence, from slot `start`
    on. beyond: see `Heads.beyond`. act: how products round what the layer multiplies; "fp8" allows a kernel to round queries,
    keys, values and weights of values as well. units, sequences: see `Packed`.
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
    act: Act = "none"
    units: int = 0
    sequences: int = 1
