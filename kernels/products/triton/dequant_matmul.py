"""triton/dequant_matmul: dequantize a slab of columns into 16-bit scratch, multiply by it with the library's GEMM, next slab.

Maths   w[k, n] = (q[n, k] - z[n, g]) * s[n, g] rounded once to x's dtype, y = x @ w + bias
        of a table scheme (packers/tables.py): w[k, n] = values[q[n, k]] * (s[n, g] * factor), values looked up in memory
Shapes  words, scales, zeros as in product.py · scratch (K, slab) in x's dtype, slab * K * 2 <= SLAB_MIB
Grid    (cdiv(K, BLOCK_K) * cdiv(slab, BLOCK_N),): a tile of words becomes E rows of scratch, stored as they are decoded
For     large M, where a fused kernel would decode each weight M / BLOCK_M times; a slab that fits the second-level cache
        (32 MiB of an H100's 50) is written and read without crossing to memory
"""

import torch
import triton
import triton.language as tl

from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import ANY_TABLE, Call, Config, register
from lowq_kernels.products.triton.decode import byte_scales, codes_per_step, decode_ptx, decoded, scales_zeros
from lowq_kernels.products.triton.product import block_k, constants, native_ptx
from lowq_packers.layouts import PackedWeight
from lowq_packers.tables import values

ALWAYS_SCALE_CODES = 1 << 30  # for `constants`: no sums here, every code is scaled


@triton.jit
def _dequant_kernel(
    words_ptr, scales_ptr, zeros_ptr, values_ptr, factors_ptr, out_ptr, n0, width, N, K, table_rows,
    TABLE: tl.constexpr, SCALES: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, UNIFORM: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ROWS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    HALVES: tl.constexpr = 2 if SCALE == "half" else 1
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tiles_n = tl.cdiv(width, BLOCK_N)
    k0 = (tl.program_id(0) // tiles_n) * (ROWS * E)
    offs_out = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_n = n0 + offs_out
    offs_r = tl.arange(0, ROWS)
    mask_n = offs_out < width
    stride = tl.cast(N, tl.int64)
    row = k0 // E * WORDS + offs_r * WORDS
    word_rows = tl.cdiv(K * BITS, 32)
    words_ptrs = words_ptr + k0 // E * WORDS * stride + (offs_r * WORDS)[:, None] * N + offs_n[None, :]
    word_0 = tl.load(words_ptrs, mask=(row < word_rows)[:, None] & mask_n[None, :], other=0, eviction_policy="evict_first")
    word_1 = word_0
    word_2 = word_0
    if WORDS == 3:
        word_1 = tl.load(words_ptrs + N, mask=(row + 1 < word_rows)[:, None] & mask_n[None, :], other=0)
        word_2 = tl.load(words_ptrs + 2 * N, mask=(row + 2 < word_rows)[:, None] & mask_n[None, :], other=0)
    for half in tl.static_range(HALVES):
        k_row = k0 + offs_r * E + half * 16
        if UNIFORM:
            meta = k0 // GROUP_SIZE * stride + offs_n[None, :]
            mask = mask_n[None, :]
        else:
            meta = (k_row // GROUP_SIZE)[:, None] * N + offs_n[None, :]
            mask = (k_row < K)[:, None] & mask_n[None, :]
        if TABLE == "":
            scales, zeros = scales_zeros(scales_ptr, zeros_ptr, meta, mask, dtype, ZERO)
        else:
            scales = tl.load(scales_ptr + meta, mask=mask, other=0)
            scales = scales.to(tl.float32) if SCALES == "float" else byte_scales(scales, SCALES)
            own = tl.minimum(offs_n, N - 1) // table_rows
            if TABLE != "fitted" and SCALES == "e4m3":
                scales = scales * tl.load(factors_ptr + own)[None, :]
            zeros = scales
        w = decoded(word_0, word_1, word_2, zeros, scales, dtype, BITS, ZERO, TABLE == "", PTX, CONSTRAINTS)
        offs_k = k0 + offs_r * E
        out_ptrs = out_ptr + offs_k.to(tl.int64)[:, None] * width + offs_out[None, :]
        for j in tl.static_range(half * 16, E // HALVES * (half + 1)):
            store_mask = mask_n[None, :] if EVEN_K else (offs_k + j < K)[:, None] & mask_n[None, :]
            value = w[j]
            if TABLE != "":
                first = (own << BITS)[None, :] if TABLE == "fitted" else 0
                value = tl.load(values_ptr + first + value.to(tl.int32)) * scales
            tl.store(out_ptrs + j * width, value.to(dtype), mask=store_mask)


def dequantize_columns(p: PackedWeight, n0: int, n1: int, out: torch.Tensor, config: Config) -> torch.Tensor:
    """Columns n0 .. n1 of W^T as (K, n1 - n0), written to the front of `out`, in its dtype."""
    out = out[: p.K * (n1 - n0)].view(p.K, n1 - n0)
    facts = constants(p.scheme, out.dtype, p.K, config["ROWS"], ALWAYS_SCALE_CODES, native_ptx(p.words))
    E = codes_per_step(p.scheme.bits)
    grid = (triton.cdiv(p.K, config["ROWS"] * E) * triton.cdiv(n1 - n0, config["BLOCK_N"]),)
    s, zeros = p.scheme, p.scales if p.zeros is None else p.zeros
    if s.table:  # codes as they are
        asm, constraints = decode_ptx(s.bits, out.dtype, "raw", False) if native_ptx(p.words) else ("", "")
        facts = facts | {"ZERO": "raw", "PTX": asm, "CONSTRAINTS": constraints}
    book = values(s, p.table, p.words.device) if s.table else zeros
    of_table = (book, zeros if p.table is None else p.table)
    facts = facts | {"TABLE": s.table, "SCALES": s.scale}
    settings = {k: v for k, v in config.items() if k != "SLAB_MIB"}
    rows = p.N if p.table is None else p.N // p.table.shape[0]
    _dequant_kernel[grid](p.words, p.scales, zeros, *of_table, out, n0, n1 - n0, p.N, p.K, rows, **(facts | settings))
    return out


def _refuse(call: Call, config: Config) -> str | None:
    return "a step is longer than K" if block_k(call, config) >= 2 * max(call.K, 64) else None


CONFIGS: tuple[Config, ...] = tuple(
    {"SLAB_MIB": slab, "ROWS": rows, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 1}
    for slab, rows, block_n in ((32, 8, 256), (1024, 4, 512), (16, 8, 256), (24, 4, 512), (128, 4, 512))
)


@register(
    "triton/dequant_matmul",
    layouts=("strided",),
    tables=ANY_TABLE,
    prefer=policy.prefers("triton/dequant_matmul"),
    rank=55,
    configs=CONFIGS,
    config_refuse=_refuse,
)
def dequant_matmul(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N)."""
    y = torch.empty(x.shape[0], p.N, dtype=x.dtype, device=x.device)
    slab = max(64, (config["SLAB_MIB"] << 20) // (2 * p.K) // 64 * 64)
    scratch = torch.empty(p.K * min(slab, p.N), dtype=x.dtype, device=x.device)  # one for all slabs: it stays in the cache
    for n0 in range(0, p.N, slab):
        n1 = min(n0 + slab, p.N)
        w, out = dequantize_columns(p, n0, n1, scratch, config), y[:, n0:n1]
        if bias is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(bias[n0:n1].to(x.dtype), x, w, out=out)
    return y
