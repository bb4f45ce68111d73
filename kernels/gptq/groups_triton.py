"""Groups of weights, for the Triton kernels that search a scale for each: what a program reads, and how scales are stored.

Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.rounding_triton import rounded

MOST = 1024  # max. weights per group: one program then holds one group
VALUES = 512  # weights per program in groups of up to 512. Zeros "int", g64, sm_90: 128 registers a thread, 240 with 1024
# Added and taken away again, this rounds a float of 0 .. 255 to the nearest whole number, of two the even one: as torch does.
ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def stored(x, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """x clamped to the finite range of DTYPE and rounded to it, in fp32."""
    return rounded(tl.minimum(tl.maximum(x, -LIMIT), LIMIT), DTYPE)


@triton.jit
def read(
    groups_ptr, weights_ptr, count, G, SIZE, stride_row, stride_group, stride_weight,
    WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A program's BLOCK_R groups of `count`: their numbers, the columns, which of these are inside, the mask of both, the
    weights, and the factors of their squared errors (1 without any)."""
    at = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_B)
    inside = (cols < SIZE)[None, :]
    mask = (at < count)[:, None] & inside
    row, group = (at // G).to(tl.int64), (at % G).to(tl.int64)
    w = tl.load(groups_ptr + (row * stride_row + group * stride_group)[:, None] + cols[None, :], mask=mask, other=0.0)
    if WEIGHTED:
        c = tl.load(weights_ptr + (group * stride_weight)[:, None] + cols[None, :], mask=inside, other=0.0)
    else:
        c = tl.where(inside, 1.0, tl.zeros_like(w))
    return at, cols, inside, mask, w, c


def operands(groups: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """Groups (R, G, g) and weights (g,) or (G, g) as `read` takes them, and its sizes: count .. stride_weight."""
    R, G, size = groups.shape
    if groups.stride(2) != 1:
        groups = groups.contiguous()
    if weights is not None:
        weights = weights.float().contiguous()
    apart = size if weights is not None and weights.dim() == 2 else 0
    return groups, weights, (R * G, G, size, groups.stride(0), groups.stride(1), apart)
