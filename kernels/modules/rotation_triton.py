"""rotate_heads in one kernel, with the bits of its definition.

Grid    (A, blocks of B): a program rotates a tile of q and one of k; a tile is heads and pairs of values
Bits    no product is fused with a sum (enable_fp_fusion), and without `wide` each result is rounded to 16 bits as torch does
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

BLOCK_B = 16  # heads of a tile, or tokens where the heads come first


@triton.jit
def _round(x, like, WIDE: tl.constexpr):
    return x if WIDE else x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _tile(x_ptr, y_ptr, cos1, cos2, sin1, sin2, at, to, mask, PAIRED: tl.constexpr, WIDE: tl.constexpr):
    one = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(x_ptr + at + PAIRED, mask=mask, other=0.0).to(tl.float32)
    first = _round(one * cos1, x_ptr, WIDE) - _round(two * sin1, x_ptr, WIDE)
    second = _round(two * cos2, x_ptr, WIDE) + _round(one * sin2, x_ptr, WIDE)
    tl.store(y_ptr + to, first.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + to + PAIRED, second.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_heads_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_to, k_to, B, BK, q_a, k_a, cos_a, sin_a, q_to_a, k_to_a,
    q_b: tl.constexpr, k_b: tl.constexpr, cos_b: tl.constexpr, sin_b: tl.constexpr, q_to_b: tl.constexpr, k_to_b: tl.constexpr,
    HALF: tl.constexpr, PAIRED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """q_a, q_b: strides of the first two dims of q, and so on; the last one's is 1. Those of the second are constants: the
    compiler then knows that a head of 72 values starts at 16 bytes, and reads four values at a time. B, BK: heads of q, of k.
    A value is paired with the one PAIRED further on."""
    a = tl.program_id(0).to(tl.int64)
    b, pair = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)[:, None], tl.arange(0, BLOCK)[None, :]
    d = pair if PAIRED == HALF else pair // PAIRED * (2 * PAIRED) + pair % PAIRED
    mask, of_k = (b < B) & (pair < HALF), (b < BK) & (pair < HALF)
    cos_ptr += a * cos_a + b * cos_b + d
    sin_ptr += a * sin_a + b * sin_b + d
    cos1 = tl.load(cos_ptr, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + PAIRED, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + PAIRED, mask=mask, other=0.0).to(tl.float32)
    _tile(q_ptr, q_to, cos1, cos2, sin1, sin2, a * q_a + b * q_b + d, a * q_to_a + b * q_to_b + d, mask, PAIRED, WIDE)
    _tile(k_ptr, k_to, cos1, cos2, sin1, sin2, a * k_a + b * k_b + d, a * k_to_a + b * k_to_b + d, of_k, PAIRED, WIDE)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, wide: bool, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rotation.rotate_heads`."""
    A, B, D = q.shape
    given = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, k)]
    given += [(t if t.stride(-1) == 1 else t.contiguous()).expand(A, B, D) for t in (cos, sin)]
    made = torch.empty_like(given[0]), torch.empty_like(given[1])
    of_a, of_b = zip(*(t.stride()[:2] for t in (*given, *made)), strict=True)
    _rotate_heads_kernel[(A, triton.cdiv(B, BLOCK_B))](
        *given, *made, B, k.shape[1], *of_a, *of_b,
        HALF=D // 2, PAIRED=D // 2 // parts, BLOCK_B=BLOCK_B, BLOCK=triton.next_power_of_2(D // 2), WIDE=wide,
        enable_fp_fusion=False,
    )  # fmt: skip
    return made
