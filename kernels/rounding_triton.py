"""Rounding inside Triton kernels to a dtype of 16 bits, with torch's results: to the nearest, of two the even one.

Triton's interpreter cuts the bits of bf16 off, so kernels that shall agree with torch there, too, round by integers.
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

# torch's dtype -> Triton's; None: fp32
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, None: tl.float32}


@triton.jit
def to_bf16(x):
    """x in fp32, rounded to bf16, as fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x in fp32, rounded to DTYPE, as fp32."""
    return to_bf16(x) if tl.bfloat16 == DTYPE else x.to(DTYPE).to(tl.float32)
