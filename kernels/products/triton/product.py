"""The tile product that every dot kernel here schedules: acc = x[rows of a tile, k range] @ W[columns of a tile, k range]^T.

Maths   acc[m, n] = sum_k x[m, k] * (q[n, k] - z[n, g]) * s[n, g],  g = k // group_size, k in [k_begin, k_end)
Shapes  x (M, K) · words (cdiv(K * BITS, 32), N) int32, layout `strided` · scales, zeros (K // group_size, N) · acc fp32
Step    one step covers ROWS word rows, BLOCK_K = ROWS * E codes: E dots of depth ROWS, one per bit position
        (decode.py says why). Tensor cores multiply at every M: at M = 1 they idle less than the units that decode.
Scales  "sum": a step lies in one group, its fp32 sum is multiplied by the scale. "code": every code is scaled in
        registers. "half": as "code", and the 32 codes of a word row may straddle two groups (1 and 3 bits, groups of 16, 48).
K       any: codes past K meet x = 0, words past the end read as 0.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.dispatch.registry import Call, Config
from lowq_kernels.products.triton.decode import codes_per_step, decode_ptx, decoded, interleaved, positions, scales_zeros
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import Scheme

SCALE_SUM_ROWS = 64  # up to this BLOCK_M, scaling BLOCK_M sums a column costs less than scaling BLOCK_K codes of it


def block_k(call: Call, config: Config) -> int:
    """Codes of k that one step of this config covers."""
    return config["ROWS"] * codes_per_step(call.scheme.bits)


def native_ptx(x: torch.Tensor) -> bool:
    """Whether inline PTX runs here: an NVIDIA GPU, not the interpreter on a CPU, not AMD."""
    return x.is_cuda and torch.version.hip is None


@cache
def constants(scheme: Scheme, dtype: torch.dtype, K: int, rows: int, block_m: int, ptx: bool) -> dict[str, object]:
    """The compile-time facts of a tile product, by the kernels' parameter names. `ptx` False decodes in plain Triton."""
    E = codes_per_step(scheme.bits)
    uniform = scheme.group_size == K or scheme.group_size % (rows * E) == 0
    if uniform and block_m <= SCALE_SUM_ROWS:
        mode = "sum"
    else:
        mode = "code" if uniform or scheme.group_size % E == 0 else "half"
    asm, constraints = decode_ptx(scheme.bits, dtype, scheme.zero, mode != "sum") if ptx else ("", "")
    return {
        "BITS": scheme.bits,
        "GROUP_SIZE": scheme.group_size,
        "ZERO": scheme.zero,
        "SCALE": mode,
        "UNIFORM": uniform,
        "PTX": asm,
        "CONSTRAINTS": constraints,
        "ROWS": rows,
        "EVEN_K": K % (rows * E) == 0,
    }


def launch_facts(x: torch.Tensor) -> dict[str, object]:
    """PDL and, where it is on, Triton's launch option for it: programs then start while the previous kernel drains."""
    on = native_ptx(x) and gpu.here(x.device.index).dependent_launch
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def operands(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, y: torch.Tensor) -> tuple[object, ...]:
    """The leading arguments of every kernel; an absent zeros or bias is stood in for by a tensor that is never read."""
    zeros = p.scales if p.zeros is None else p.zeros
    return x, p.words, p.scales, zeros, p.scales if bias is None else bias, y, x.shape[0], p.N, p.K


@triton.jit
def tile_product(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, M, N, K, offs_m, offs_n, k_begin, k_end,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, UNIFORM: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ROWS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """acc over k in [k_begin, k_end), k_begin a multiple of BLOCK_K: (BLOCK_M, BLOCK_N) fp32, or its transpose if TRANSPOSED.

    TRANSPOSED computes W @ x^T: the decoded weight is then the first operand, which wgmma (BLOCK_N >= 64 a warp group) takes
    from registers, and small M pads to 8 columns instead of 16 rows.
    """
    E: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    BLOCK_K: tl.constexpr = ROWS * E
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs_r = tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    word_rows = tl.cdiv(K * BITS, 32)
    stride = tl.cast(N, tl.int64)  # of words, scales and zeros; large weights pass 2^31 bytes
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    offs_words = offs_r[:, None] * (WORDS * N) + offs_n[None, :]
    if TRANSPOSED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(k_begin, k_end, BLOCK_K):
        row0 = k0 // E * WORDS
        words_ptrs = words_ptr + row0 * stride + offs_words
        if EVEN_K:
            word_0 = tl.load(words_ptrs, mask=mask_n[None, :], other=0, eviction_policy="evict_first")
        else:
            row = row0 + offs_r * WORDS
            mask = (row < word_rows)[:, None] & mask_n[None, :]
            word_0 = tl.load(words_ptrs, mask=mask, other=0, eviction_policy="evict_first")
        word_1 = word_0
        word_2 = word_0
        if WORDS == 3:
            if EVEN_K:
                word_1 = tl.load(words_ptrs + N, mask=mask_n[None, :], other=0, eviction_policy="evict_first")
                word_2 = tl.load(words_ptrs + 2 * N, mask=mask_n[None, :], other=0, eviction_policy="evict_first")
            else:
                mask = (row + 1 < word_rows)[:, None] & mask_n[None, :]
                word_1 = tl.load(words_ptrs + N, mask=mask, other=0, eviction_policy="evict_first")
                mask = (row + 2 < word_rows)[:, None] & mask_n[None, :]
                word_2 = tl.load(words_ptrs + 2 * N, mask=mask, other=0, eviction_policy="evict_first")
        if EVEN_K:
            x = tl.load(x_ptrs + k0, mask=mask_m[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + k0, mask=mask_m[:, None] & (k0 + offs_k < K)[None, :], other=0.0)
        if UNIFORM:  # one row of scales for the whole step
            meta = k0 // GROUP_SIZE * stride + offs_n
            scales = tl.load(scales_ptr + meta, mask=mask_n, other=0.0)
            if ZERO == "none":
                zeros = scales.to(dtype)[None, :]
            else:
                zeros = tl.load(zeros_ptr + meta, mask=mask_n, other=0.0).to(dtype)[None, :]
            code_scales = scales.to(dtype)[None, :]
            w = decoded(word_0, word_1, word_2, zeros, code_scales, dtype, BITS, ZERO, SCALE != "sum", PTX, CONSTRAINTS)
        else:  # a row of scales for each word row
            k_row = k0 + offs_r * E
            mask = (k_row < K)[:, None] & mask_n[None, :]
            meta = (k_row // GROUP_SIZE)[:, None] * N + offs_n[None, :]
            code_scales, zeros = scales_zeros(scales_ptr, zeros_ptr, meta, mask, dtype, ZERO)
            w = decoded(word_0, word_1, word_2, zeros, code_scales, dtype, BITS, ZERO, True, PTX, CONSTRAINTS)
            if SCALE == "half":  # codes 16 .. 31 of a row may lie in the next group
                mask = (k_row + 16 < K)[:, None] & mask_n[None, :]
                meta = ((k_row + 16) // GROUP_SIZE)[:, None] * N + offs_n[None, :]
                code_scales, zeros = scales_zeros(scales_ptr, zeros_ptr, meta, mask, dtype, ZERO)
                w_high = decoded(word_0, word_1, word_2, zeros, code_scales, dtype, BITS, ZERO, True, PTX, CONSTRAINTS)

        if SCALE == "sum":
            if TRANSPOSED:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            else:
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        else:
            part = acc
        if NATURAL:
            if SCALE == "half":
                codes = ()
                for j in tl.static_range(E):
                    codes = codes + ((w_high[j] if j >= 16 else w[j]),)
            else:
                codes = w
            w_tile = interleaved(codes, ROWS, BLOCK_N, E)
            if PTX == "" and dtype == tl.bfloat16:  # Triton's interpreter multiplies the bits of bf16 as if whole numbers
                w_tile = w_tile.to(tl.float32)
                x = x.to(tl.float32)
            if TRANSPOSED:
                part = tl.dot(tl.trans(w_tile), tl.trans(x), part)
            else:
                part = tl.dot(x, w_tile, part)
        else:
            xs = positions(x, BLOCK_M, ROWS, E)
            for j in tl.static_range(E):
                if SCALE == "half" and j >= 16:
                    w_j = w_high[j]
                else:
                    w_j = w[j]
                x_j = xs[j]
                if PTX == "" and dtype == tl.bfloat16:
                    w_j = w_j.to(tl.float32)
                    x_j = x_j.to(tl.float32)
                if TRANSPOSED:
                    part = tl.dot(tl.trans(w_j), tl.trans(x_j), part)
                else:
                    part = tl.dot(x_j, w_j, part)
        if SCALE == "sum":
            if TRANSPOSED:
                acc += part * scales.to(tl.float32)[:, None]
            else:
                acc += part * scales.to(tl.float32)[None, :]
        else:
            acc = part
    return acc
