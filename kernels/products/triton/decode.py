"""Codes out of packed words, in registers: each word is loaded once and yields E tensors, one per bit position.

A `strided` word (r, n) holds codes k = r*E .. r*E + E-1 of column n, E = 32 // bits (3 bits: 32 codes in 3 words). Position
j of all words of a (ROWS, BLOCK_N) tile is a (ROWS, BLOCK_N) matrix of weights with k = r*E + j, so a product over k is E
products over r, and no code ever changes lane. Two words of one thread are decoded together (`pack=2`): `prmt` pairs
their 16-bit halves, and one `lop3` per position leaves two codes with the exponent of a magic number, 1024 + q * 2^d
(fp16) or 128 + q * 2^d (bf16), which one fused multiply-add turns into q - z exactly where z is a whole number. That is
1.25 instructions a code at 4 bits, where shift, mask and convert take 4. (Idea: Kim et al. 2022, arXiv:2211.10017.)

`decode_ptx` writes that PTX; "" selects the plain Triton path, which the interpreter and AMD take.
"""

import struct
from functools import cache

import torch
import triton
import triton.language as tl

MAGIC = {torch.float16: (0x6400, 1024.0, 10), torch.bfloat16: (0x4300, 128.0, 7)}  # bits of 2^m, 2^m, mantissa bits m


def codes_per_step(bits: int) -> int:
    """E: codes that the words of one row hold; 3 bits take three words for 32 codes."""
    return 32 if bits == 3 else 32 // bits


def _pair(value: float, dtype: torch.dtype) -> str:
    """Two equal 16-bit floats in one 32-bit register, as a PTX literal. The value must be exact in `dtype`."""
    if dtype == torch.float16:
        half = struct.unpack("<H", struct.pack("<e", value))[0]
    else:
        half = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    return f"{half | half << 16:#010x}"


class _Asm:
    """PTX text under construction: numbered registers, common subexpressions emitted once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[str, str] = {}

    def value(self, op: str, kind: str = "b32") -> str:
        """Register holding `op`, e.g. "shr.b32 {}, h0, 8"; an op seen before is not emitted again."""
        if op not in self.known:
            self.known[op] = f"t{len(self.known)}"
            self.lines.append(f".reg .{kind} {self.known[op]}; {op.format(self.known[op])};")
        return self.known[op]


def _raw_code(asm: _Asm, halves: list[str], bit: int, bits: int, dtype: torch.dtype) -> tuple[str, int]:
    """(register, d): a pair of 2^m + q * 2^d for the code that starts at `bit` of the 16-bit halves."""
    magic, _, mantissa = MAGIC[dtype]
    half, offset = divmod(bit, 16)
    word = halves[half]
    ones = (1 << bits) - 1
    if offset + bits > 16:  # a 3-bit code that straddles two halves: low bits from this one, high bits from the next
        low = 16 - offset
        tail = asm.value(f"shl.b32 {{}}, {halves[half + 1]}, {low}")
        head = asm.value(f"shr.b32 {{}}, {word}, {offset}")
        mask = (1 << low) - 1
        head = asm.value(f"lop3.b32 {{}}, {head}, {mask | mask << 16:#x}, {magic | magic << 16:#x}, 0xea")
        mask = ones & ~mask
        return asm.value(f"lop3.b32 {{}}, {tail}, {mask | mask << 16:#x}, {head}, 0xea"), 0
    shift = 0 if offset + bits <= mantissa else 8 if offset >= 8 and offset - 8 + bits <= mantissa else offset
    if shift:
        word = asm.value(f"shr.b32 {{}}, {word}, {shift}")
    d = offset - shift
    mask = ones << d
    return asm.value(f"lop3.b32 {{}}, {word}, {mask | mask << 16:#x}, {magic | magic << 16:#x}, 0xea"), d


@cache
def decode_ptx(bits: int, dtype: torch.dtype, zero: str, scaled: bool) -> tuple[str, str]:
    """(asm, constraints) for `tl.inline_asm_elementwise(..., pack=2)`: words[, zeros][, scales] -> E tensors of `dtype`.

    Each output is q - z (z from the zeros operand, or the constant mid for zero "none"; zero "raw" leaves q alone),
    times the scale if `scaled`. q - z is exact but for one rounding of a fractional z.
    """
    E, n_words = codes_per_step(bits), 3 if bits == 3 else 1
    kind = "f16x2" if dtype == torch.float16 else "bf16x2"
    asm = _Asm()
    has_z = zero in ("int", "float")
    # every input is read before any output is written: the two may share registers
    inputs = [asm.value(f"mov.b32 {{}}, ${E + i}") for i in range(2 * n_words + has_z + scaled)]
    pairs = [(inputs[2 * i], inputs[2 * i + 1]) for i in range(n_words)]
    halves = [asm.value(f"prmt.b32 {{}}, {a}, {b}, {pick}") for a, b in pairs for pick in ("0x5410", "0x7632")]
    z = inputs[2 * n_words] if has_z else None
    s = inputs[-1] if scaled else None
    mid = (0.5 if bits == 1 else float(1 << (bits - 1))) if zero == "none" else 0.0
    wide = bits == 8 and dtype == torch.bfloat16  # 8 bits do not fit bf16's magic number: go through fp32's, 2^23
    for j in range(E):
        if wide:
            words = [asm.value(f"prmt.b32 {{}}, {word}, 0x4b000000, 0x744{j}") for word in pairs[0]]
            base = struct.unpack("<I", struct.pack("<f", 2.0**23 + mid))[0]
            lo, hi = (asm.value(f"sub.f32 {{}}, {w}, {f'0f{base:08X}'}", "f32") for w in words)
            code = asm.value(f"cvt.rn.bf16x2.f32 {{}}, {hi}, {lo}")
            if z is not None:
                code = asm.value(f"fma.rn.{kind} {{}}, {z}, {asm.value('mov.b32 {}, ' + _pair(-1.0, dtype))}, {code}")
        else:
            raw, d = _raw_code(asm, halves, j * bits, bits, dtype)
            base = MAGIC[dtype][1] * 2.0**-d
            mul = asm.value("mov.b32 {}, " + _pair(2.0**-d, dtype))
            minus = asm.value("mov.b32 {}, " + _pair(-1.0, dtype))
            if zero == "int":  # base + z is a whole number (or a multiple of 2^-d) that the format holds exactly
                bias = asm.value("mov.b32 {}, " + _pair(-base, dtype))
                bias = asm.value(f"fma.rn.{kind} {{}}, {z}, {minus}, {bias}")
            elif zero == "none" and bits == 1:  # base + 1/2 needs a bit more than the format has: subtract in two steps
                bias = asm.value("mov.b32 {}, " + _pair(-base, dtype))
            else:
                bias = asm.value("mov.b32 {}, " + _pair(-(base + mid), dtype))
            code = asm.value(f"fma.rn.{kind} {{}}, {raw}, {mul}, {bias}")
            if zero == "float":
                code = asm.value(f"fma.rn.{kind} {{}}, {z}, {minus}, {code}")
            elif zero == "none" and bits == 1:
                half = asm.value("mov.b32 {}, " + _pair(-0.5, dtype))
                unit = asm.value("mov.b32 {}, " + _pair(1.0, dtype))
                code = asm.value(f"fma.rn.{kind} {{}}, {code}, {unit}, {half}")
        if s is not None:
            nought = asm.value("mov.b32 {}, " + _pair(-0.0, dtype))
            code = asm.value(f"fma.rn.{kind} {{}}, {code}, {s}, {nought}")
        asm.lines.append(f"mov.b32 ${j}, {code};")
    return "{\n" + "\n".join(asm.lines) + "\n}", ",".join(["=r"] * E + ["r"] * len(inputs))


@triton.constexpr_function
def repeated(value, times):
    """(value,) * times, for the outputs of inline_asm_elementwise."""
    return (value,) * times


@triton.jit
def plain_code(word_0, word_1, word_2, j: tl.constexpr, BITS: tl.constexpr):
    """Code j of a word (3 bits: of three words), as int32."""
    BIT: tl.constexpr = j * BITS
    OFFSET: tl.constexpr = BIT % 32
    ONES: tl.constexpr = (1 << BITS) - 1
    if BIT < 32:
        word = word_0
        after = word_1
    elif BIT < 64:
        word = word_1
        after = word_2
    else:
        word = word_2
        after = word_2
    if OFFSET + BITS > 32:
        LOW: tl.constexpr = 32 - OFFSET
        q = ((word >> OFFSET) & ((1 << LOW) - 1)) | ((after << LOW) & ONES)
    else:
        q = (word >> OFFSET) & ONES
    return q


@triton.jit
def byte_scales(b, SCALES: tl.constexpr):
    """Scales of 8 bits, "e4m3" or "e8m0", as fp32: bits in fp32's place; of e4m3 with the sign, times 2^120 by the bias."""
    if SCALES == "e8m0":
        return (b.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    bits = (b.to(tl.int32) & 127) << 20 | (b.to(tl.int32) & 128) << 24
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def scales_zeros(scales_ptr, zeros_ptr, meta, mask, dtype: tl.constexpr, ZERO: tl.constexpr):
    """Scales and zeros at the offsets `meta`, in `dtype`; where there are no zeros, scales stand in for them."""
    scales = tl.load(scales_ptr + meta, mask=mask, other=0.0).to(dtype)
    zeros = scales
    if ZERO != "none":
        zeros = tl.load(zeros_ptr + meta, mask=mask, other=0.0).to(dtype)
    return scales, zeros


@triton.jit
def decoded(
    word_0, word_1, word_2, zeros, scales,  # (ROWS, N) int32; zeros and scales broadcastable to it
    dtype: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """E tensors (ROWS, N) of `dtype`: (q - z)[* s] at each bit position. zeros or scales that the case has not are unused."""
    E: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    if PTX != "":
        if BITS == 3:
            words = (word_0, word_1, word_2)
        else:
            words = (word_0,)
        if ZERO == "int" or ZERO == "float":
            words = words + (zeros,)
        if SCALED:
            words = words + (scales,)
        codes = tl.inline_asm_elementwise(PTX, CONSTRAINTS, words, dtype=repeated(dtype, E), is_pure=True, pack=2)
    else:
        codes = ()
        for j in tl.static_range(E):
            w = plain_code(word_0, word_1, word_2, j, BITS).to(tl.float32)
            if ZERO == "int" or ZERO == "float":
                w = w - zeros.to(tl.float32)
            elif ZERO == "none":
                w = w - (0.5 if BITS == 1 else 1 << (BITS - 1))
            if SCALED:
                w = w * scales.to(tl.float32)
            codes = codes + (w.to(dtype),)
    return codes


@triton.jit
def positions(x, A: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """x (A, R * E) -> E tensors (A, R): entry j holds x[:, j::E]. Only registers change names."""
    parts = (tl.reshape(x, (A, R, E)),)
    STEPS: tl.constexpr = 2 if E == 4 else 3 if E == 8 else 4 if E == 16 else 5
    for step in tl.static_range(STEPS):
        # after each step parts[i] holds x[:, i :: len(parts)]: split off the lowest bit of j, evens before odds
        evens = ()
        odds = ()
        for i in tl.static_range(1 << step):
            if E >> (step + 1) > 1:
                even, odd = tl.split(tl.reshape(parts[i], (A, R, E >> (step + 1), 2)))
            else:
                even, odd = tl.split(tl.reshape(parts[i], (A, R, 2)))
            evens = evens + (even,)
            odds = odds + (odd,)
        parts = evens + odds
    return parts


@triton.jit
def interleaved(codes, R: tl.constexpr, N: tl.constexpr, E: tl.constexpr):
    """Inverse of `positions` along k: E tensors (R, N) of codes -> (R * E, N) with k = r * E + j."""
    parts = codes
    STEPS: tl.constexpr = 2 if E == 4 else 3 if E == 8 else 4 if E == 16 else 5
    for step in tl.static_range(STEPS):
        joined = ()
        for i in tl.static_range(E >> (step + 1)):
            joined = joined + (tl.join(parts[i], parts[i + (E >> (step + 1))]),)
        parts = joined
    return tl.reshape(tl.permute(tl.reshape(parts[0], (R, N, E)), (0, 2, 1)), (R * E, N))
