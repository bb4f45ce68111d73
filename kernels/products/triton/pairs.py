"""Packed words -> wgmma's first operand, in the registers of the lanes that multiply: what gemm_wide decodes by.

A lane of that operand holds pairs of neighbouring codes, k = 2t and 2t + 1, so a pair is decoded at once: its bits are moved
under the exponent of a magic number (decode.py), which makes q exact, and q * s - z * s is one more multiply-add. Every lane
reads just the words that its pairs are in; no code changes lanes. `pairs_layout` says where they are, `pick` how a lane finds
a pair in its word, `pair_ptx` decodes it.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowq_kernels.products.triton.decode import MAGIC, repeated

TMA_ROWS = gl.constexpr(8)  # swizzled together: a step of 2 or 1 bits loads more rows of words than the 4 or 2 it uses
# (column, word) of 8 rows of words as lanes hold them, the words that a step does not use in registers of their own
EIGHT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [0, 2], [8, 0], [0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)


@cache
def pick(bits: int, dtype: torch.dtype) -> tuple[int, int]:
    """(a, b): the operand by which `pair_ptx` finds pair p of a word is a * p + b.

    It is the byte selector of prmt where a pair lies in whole bytes (8 bits; 4 bits of fp16), else the pair's first bit.
    """
    if bits == 8:
        return (0x202, 0x4140) if dtype == torch.float16 else (2, 0x7440)
    return (0x101, 0x4040) if bits == 4 and dtype == torch.float16 else (2 * bits, 0)


@cache
def pair_ptx(bits: int, dtype: torch.dtype) -> str:
    """PTX for one pair of codes: (word, `pick` of the pair, scale twice, -zero * scale twice) -> two weights.

    Both codes come out as 2^m + q * 2^d; q is then exact, and q * s - z * s rounded once.
    """
    half, kind = dtype == torch.float16, "f16x2" if dtype == torch.float16 else "bf16x2"
    ones = (1 << bits) - 1
    magic, base, mantissa = MAGIC[dtype]
    pair = lambda lo, hi: _two(lo, dtype) | _two(hi, dtype) << 16  # noqa: E731
    mul, minus = pair(1.0, 1.0), pair(-base, -base)
    lines = [".reg .b32 v, u, t;"]
    if bits == 8 and half:  # code, magic, code, magic
        lines.append(f"prmt.b32 u, $2, {magic >> 8:#x}, $3;")
    elif bits == 8:  # 8 bits do not fit bf16's magic number: go through fp32's, 2^23
        lines += [".reg .f32 lo, hi;", "prmt.b32 u, $2, 0x4b000000, $3;", "add.u32 v, $3, 1;"]
        lines += ["prmt.b32 t, $2, 0x4b000000, v;", "mov.b32 lo, u; mov.b32 hi, t;"]
        lines += ["sub.f32 lo, lo, 0f4B000000;", "sub.f32 hi, hi, 0f4B000000;", "cvt.rn.bf16x2.f32 u, hi, lo;"]
    elif 2 * bits <= mantissa:  # the second code may stay where it is, above the first: its weight is 2^bits
        lines += ["prmt.b32 u, $2, 0, $3;"] if bits == 4 else ["shr.b32 v, $2, $3;", "prmt.b32 u, v, v, 0x1010;"]
        lines.append(f"lop3.b32 u, u, {ones | ones << 16 + bits:#x}, {magic * 65537:#x}, 0xea;")
        mul, minus = pair(1.0, 2.0**-bits), pair(-base, -base * 2.0**-bits)
    else:
        lines += ["shr.b32 v, $2, $3;", f"lop3.b32 u, v, {ones:#x}, {magic * 65537:#x}, 0xea;"]
        lines += [f"shl.b32 t, v, {16 - bits};", f"lop3.b32 u, t, {ones << 16:#x}, u, 0xea;"]
    if half or bits < 8:
        lines += [f"mov.b32 v, {mul:#x};", f"mov.b32 t, {minus:#x};", f"fma.rn.{kind} u, u, v, t;"]
    lines += [f"fma.rn.{kind} u, u, $4, $5;", "mov.b32 {$0, $1}, u;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _two(value: float, dtype: torch.dtype) -> int:
    """The 16 bits of a float that `dtype` holds exactly."""
    return int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF


@cache
def pairs_layout(bits: int) -> gl.DistributedLinearLayout:
    """Where wgmma's first operand (64, 64) keeps its pairs of codes, as (row of W, word, pair in the word)."""
    C = 16 // bits  # pairs in a word

    def place(pair: int) -> list[int]:
        return [0, pair // C, pair % C]

    registers = [[8, 0, 0], place(4), place(8), place(16)]
    lanes = [place(1), place(2), [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 32 // C, C])


@gluon.jit
def twice(scales, zeros, MID: gl.constexpr, dtype: gl.constexpr):
    """(scale twice, -zero * scale twice) of each row of W, as pair_ptx takes them."""
    shift = scales.to(gl.float32) * (-MID if MID >= 0 else -zeros.to(gl.float32))
    s = scales.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    z = shift.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return s | (s << 16), z | (z << 16)


@gluon.jit
def operand(
    words_smem, s, z, PTX: gl.constexpr, PICK: gl.constexpr, ROWS: gl.constexpr, WHICH: gl.constexpr,
    PAIRS: gl.constexpr, A: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Words (ROWS, BLOCK_N) of a stage, s and z of `twice` -> this group's weights (64, 64) as wgmma's first operand."""
    C: gl.constexpr = 64 // ROWS // 2  # pairs in a word
    group = words_smem.slice(WHICH * 64, 64, dim=1).permute((1, 0))
    if ROWS >= TMA_ROWS:
        words = group.load(gl.SliceLayout(2, PAIRS))
    else:  # TMA brought 8 rows, the step needs the first 4 or 2: the others fall away before they are read
        words = group.load(EIGHT)
        words, _ = gl.split(gl.permute(gl.reshape(words, (64, 2, 4)), (0, 2, 1)))
        if ROWS == 2:
            words, _ = gl.split(gl.permute(gl.reshape(words, (64, 2, 2)), (0, 2, 1)))
        words = gl.convert_layout(words, gl.SliceLayout(2, PAIRS), assert_trivial=True)
    find = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS))) * PICK[0] + PICK[1]
    words, find = gl.expand_dims(words, 2), gl.expand_dims(gl.expand_dims(find, 0), 1)
    s, z = gl.expand_dims(gl.expand_dims(s, 1), 2), gl.expand_dims(gl.expand_dims(z, 1), 2)
    words, find = gl.broadcast(words, find)
    words, s = gl.broadcast(words, s)
    words, z = gl.broadcast(words, z)
    lo, hi = gl.inline_asm_elementwise(
        PTX, "=h,=h,r,r,r,r", [words, find, s, z], dtype=repeated(dtype, 2), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(lo, hi), (64, 64)), A, assert_trivial=True)
