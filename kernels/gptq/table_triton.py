"""The nearest value of a sorted table, for Triton kernels: its up to 16 values are scalars, compared one after the other.

Maths   place(x) = the number of middles of neighbouring values that are less than x, as torch.bucketize counts them
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import triton
import triton.language as tl


@triton.jit
def loaded(ptr, LEVELS: tl.constexpr):
    """LEVELS numbers as a tuple of scalars: a loop that reads them keeps them in registers."""
    values = (tl.load(ptr),)
    for i in tl.static_range(1, LEVELS):
        values += (tl.load(ptr + i),)  # type: ignore[assignment]
    return values


@triton.jit
def nearest(x, values, results, LEVELS: tl.constexpr):
    """For each x, the result at the place of the value that is nearest to it; of two equally near, at the first's."""
    out = tl.zeros_like(x).to(results[0].dtype) + results[0]
    for i in tl.static_range(1, LEVELS):
        out = tl.where(x > (values[i] + values[i - 1]) * 0.5, results[i], out)
    return out


@triton.jit
def divisor(s, TINY: tl.constexpr):
    """Scales of any sign, none of them nearer to 0 than TINY."""
    wide = tl.maximum(tl.abs(s), TINY)
    return tl.where(s < 0, -wide, wide)
