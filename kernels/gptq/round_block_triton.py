"""gptq's inner loop in one launch.

Maths   for each column i of a row: q = clamp(round(w_i / s + z)), e_i = (w_i - (q - z) s) / factor[i, i],
        and w_j -= e_i factor[i, j] for every j > i; with a table, q is the code of the value nearest to w_i / s, which
        replaces q - z
Shapes  block (R, B) fp32, factor (B, B) upper triangular, scales and zeros (R,) -> codes, errors (R, B)
Grid    (cdiv(R, BLOCK_R),): one program = some rows, which stay in registers from the first column to the last
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from typing import Any

import torch
import triton
import triton.language as tl

from lowq_kernels.gptq.groups_triton import ROUNDER
from lowq_kernels.gptq.table_triton import divisor, loaded, nearest

BLOCK_R = 16  # rows: with 128 columns, 16 values of each of the three blocks a thread


@triton.jit
def _round_block_kernel(
    block_ptr, factor_ptr, scales_ptr, zeros_ptr, values_ptr, order_ptr, codes_ptr, errors_ptr,
    R, B, stride_row, stride_fi, stride_fj, stride_scale,
    TOP: tl.constexpr, TABLE: tl.constexpr, TINY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_B)
    mask = (rows < R)[:, None] & (cols < B)[None, :]
    left = tl.load(block_ptr + rows.to(tl.int64)[:, None] * stride_row + cols[None, :], mask=mask, other=0.0)
    s = tl.load(scales_ptr + rows.to(tl.int64) * stride_scale, mask=rows < R, other=1.0)
    if TABLE:
        values, order, wide = loaded(values_ptr, TOP + 1), loaded(order_ptr, TOP + 1), divisor(s, TINY)
    else:
        z = tl.load(zeros_ptr + rows.to(tl.int64) * stride_scale, mask=rows < R, other=0.0)
        inverse = 1 / s
    codes, errors = left, left
    for i in range(B):
        f = tl.load(factor_ptr + i * stride_fi + cols * stride_fj, mask=(cols >= i) & (cols < B), other=0.0)
        here = (cols == i)[None, :]
        w = tl.sum(tl.where(here, left, 0.0), 1)
        diagonal = tl.sum(tl.where(cols == i, f, 0.0), 0)
        if TABLE:
            x = tl.div_rn(w, wide)
            q = nearest(x, values, order, TOP + 1).to(tl.float32)
            e = (w - nearest(x, values, values, TOP + 1) * s) * tl.div_rn(1.0, diagonal)
        else:
            q = tl.minimum(tl.maximum(w * inverse + z, 0.0), TOP)
            q = (q + ROUNDER) - ROUNDER
            e = (w - (q - z) * s) / diagonal
        codes = tl.where(here, q[:, None], codes)
        errors = tl.where(here, e[:, None], errors)
        left -= e[:, None] * f[None, :]  # column i itself is not read again
    out = rows.to(tl.int64)[:, None] * B + cols[None, :]
    tl.store(codes_ptr + out, codes, mask=mask)
    tl.store(errors_ptr + out, errors, mask=mask)


def round_block_triton(
    block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_block.round_block`; columns of block contiguous, scales and zeros equally far apart."""
    assert scales.stride() == zeros.stride()
    return _rounded(block, factor, scales, zeros, scales, scales, TOP=levels - 1, TABLE=False, TINY=0.0)


def round_by_table_triton(
    block: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, codes: torch.Tensor, tiny: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the sorted values (L,) fp32 of a table, and their codes. tiny: the smallest magnitude of a divisor."""
    options = {"TOP": len(values) - 1, "TABLE": True, "TINY": tiny}
    return _rounded(block, factor, scales, scales, values, codes, **options, enable_fp_fusion=False)


def _rounded(
    block: torch.Tensor, factor: torch.Tensor, *grid: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    R, B = block.shape
    assert block.stride(1) == 1
    codes, errors = block.new_empty(R, B), block.new_empty(R, B)
    with torch.cuda.device_of(block):  # Triton launches on the current device
        _round_block_kernel[(triton.cdiv(R, BLOCK_R),)](
            block, factor, *grid, codes, errors, R, B, block.stride(0), *factor.stride(), grid[0].stride(0),
            BLOCK_R=BLOCK_R, BLOCK_B=triton.next_power_of_2(B), num_warps=4, **options,
        )  # fmt: skip
    return codes, errors
