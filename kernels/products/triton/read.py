"""Read memory without using it: measures the floor of every memory-bound kernel.

Maths   none: the sum is kept so that the loads are not dropped, and stored only if it hits one value in 2^32
Shapes  data (n,) int32, n a multiple of BLOCK * UNROLL
Grid    (n / (BLOCK * UNROLL),)
"""

import torch
import triton
import triton.language as tl

READ_CONFIGS: tuple[dict[str, int], ...] = (  # the fastest one gives the ceiling; they differ by a few percent
    {"BLOCK": 1024, "UNROLL": 4, "num_warps": 4},
    {"BLOCK": 2048, "UNROLL": 4, "num_warps": 4},
    {"BLOCK": 2048, "UNROLL": 8, "num_warps": 8},
    {"BLOCK": 1024, "UNROLL": 8, "num_warps": 4},
)


@triton.jit
def _read_kernel(data_ptr, out_ptr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * BLOCK * UNROLL
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(UNROLL):
        total += tl.load(data_ptr + base + i * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    if tl.sum(total) == 123456789:
        tl.store(out_ptr, 1)


def read_all(data: torch.Tensor, config: dict[str, int]) -> torch.Tensor:
    """Read every int32 of `data`; returns a one-element tensor that means nothing."""
    out = torch.empty(1, dtype=torch.int32, device=data.device)
    _read_kernel[(data.numel() // (config["BLOCK"] * config["UNROLL"]),)](data, out, **config)
    return out
