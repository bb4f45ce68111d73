"""triton/gemv_splitk: one row of x against a slice of W, on the ordinary fp32 units.

Maths   y[m, n] = sum_k x[m, k] * (q[n, k] - z[n, g]) * s[n, g] + bias[n]; a word's E products are summed first, so the
        scale and zero cost one multiply-add a word, not a code: (sum_j q_j x_j - z * sum_j x_j) * s
Shapes  x (M, K), M small: each row reads W again, from the second-level cache · words (cdiv(K * BITS, 32), N) · y (M, N)
Grid    (cdiv(N, BLOCK_N) * SPLIT_K * M,)
Split   SPLIT_K programs, each looping over its range of k; or (SPLIT_K = 0, benchmarks/papers/gemv_gemlite.py) one step a
        program. Partial sums meet as partial.py says: fp32, in order, no atomics on y, no zero-fill launch
Source  the schedule: GemLite's GEMV_SPLITK (Badri 2024), with an ordered reduction
"""

from functools import cache

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config, configs_of, register
from lowq_kernels.products.triton.decode import codes_per_step, decode_ptx, decoded
from lowq_kernels.products.triton.fit import imbalance
from lowq_kernels.products.triton.overlap import overlap_previous
from lowq_kernels.products.triton.partial import arrived_last, split_scratch
from lowq_kernels.products.triton.product import block_k, launch_facts, native_ptx, operands
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import Scheme

MOST_CODES = 1024  # decoded codes a thread may hold between two loads of scales: 2048 spilled, and took 80 s to compile
M_MAX = 4  # GemLite's range: above it the dot kernels, which read W once for all rows, are faster


@triton.jit
def _dot_words(codes, x_ptr, offs_k, K, FIRST: tl.constexpr, LAST: tl.constexpr, EVEN_K: tl.constexpr):
    """(sum_j q_j x_j as (ROWS, BLOCK_N), sum_j x_j as (ROWS, 1)) over positions FIRST .. LAST - 1 of a step's words."""
    products = tl.zeros(codes[0].shape, tl.float32)
    x_sum = tl.zeros((codes[0].shape[0], 1), tl.float32)
    for j in tl.static_range(FIRST, LAST):
        if EVEN_K:
            x = tl.load(x_ptr + offs_k + j)
        else:
            x = tl.load(x_ptr + offs_k + j, mask=offs_k + j < K, other=0.0)
        x = x.to(tl.float32)[:, None]
        products += codes[j].to(tl.float32) * x
        x_sum += x
    return products, x_sum


@triton.jit(do_not_specialize=["M", "SPLIT_K"])
def _gemv_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, K, partials_ptr, counters_ptr, SPLIT_K,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, UNIFORM: tl.constexpr, HALF: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARE: tl.constexpr, LOOP: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = 32 if BITS == 3 else 32 // BITS
    WORDS: tl.constexpr = 3 if BITS == 3 else 1
    BLOCK_K: tl.constexpr = ROWS * E
    MIDDLE: tl.constexpr = 16 if HALF else E
    MID: tl.constexpr = 0.5 if BITS == 1 else 1 << (BITS - 1)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tiles = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles % SPLIT_K
    m = tl.program_id(0) // (tiles * SPLIT_K)
    x_ptr += m.to(tl.int64) * K
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, ROWS)
    mask_n = offs_n < N
    stride = tl.cast(N, tl.int64)
    word_rows = tl.cdiv(K * BITS, 32)
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    k_range = tl.cdiv(tl.cdiv(K, BLOCK_K * SHARE), SPLIT_K) * (BLOCK_K * SHARE)
    k_begin = split * k_range
    k_end = tl.minimum(K, k_begin + k_range) if LOOP else k_begin + 1
    if PDL:
        row_end = tl.cdiv(tl.minimum(K, k_begin + k_range) * BITS, 32)
        overlap_previous(words_ptr, k_begin * BITS // 32, row_end, tile * BLOCK_N, N, BLOCK_N)
    for k_outer in range(k_begin, k_end, BLOCK_K * SHARE):
        if UNIFORM:  # one row of scales and zeros for all SHARE steps
            meta = k_outer // GROUP_SIZE * stride + offs_n
            s = tl.load(scales_ptr + meta, mask=mask_n, other=0.0).to(tl.float32)[None, :]
            if ZERO == "none":
                z = MID
            else:
                z = tl.load(zeros_ptr + meta, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        for step in tl.static_range(SHARE):
            k0 = k_outer + step * BLOCK_K
            row0 = k0 // E * WORDS
            row = row0 + offs_r * WORDS
            words_ptrs = words_ptr + row0 * stride + (offs_r * WORDS)[:, None] * N + offs_n[None, :]
            mask = mask_n[None, :] if EVEN_K else (row < word_rows)[:, None] & mask_n[None, :]
            word_0 = tl.load(words_ptrs, mask=mask, other=0, eviction_policy="evict_first")
            word_1 = word_0
            word_2 = word_0
            if WORDS == 3:
                mask = mask_n[None, :] if EVEN_K else (row + 1 < word_rows)[:, None] & mask_n[None, :]
                word_1 = tl.load(words_ptrs + N, mask=mask, other=0, eviction_policy="evict_first")
                mask = mask_n[None, :] if EVEN_K else (row + 2 < word_rows)[:, None] & mask_n[None, :]
                word_2 = tl.load(words_ptrs + 2 * N, mask=mask, other=0, eviction_policy="evict_first")
            codes = decoded(word_0, word_1, word_2, word_0, word_0, dtype, BITS, "raw", False, PTX, CONSTRAINTS)
            for part in tl.static_range(2 if HALF else 1):  # HALF: codes 16 .. 31 may lie in the next group
                if not UNIFORM:
                    k_row = k0 + offs_r * E + part * MIDDLE
                    meta_ok = (k_row < K)[:, None] & mask_n[None, :]
                    meta = (k_row // GROUP_SIZE)[:, None] * N + offs_n[None, :]
                    s = tl.load(scales_ptr + meta, mask=meta_ok, other=0.0).to(tl.float32)
                    if ZERO == "none":
                        z = MID
                    else:
                        z = tl.load(zeros_ptr + meta, mask=meta_ok, other=0.0).to(tl.float32)
                offs_k = k0 + offs_r * E
                products, x_sum = _dot_words(codes, x_ptr, offs_k, K, part * MIDDLE, part * MIDDLE + MIDDLE, EVEN_K)
                acc += (products - z * x_sum) * s
    y = tl.sum(acc, 0)
    offs_y = m.to(tl.int64) * N + offs_n
    whole = SPLIT_K > 0
    if SPLIT:
        slots = partials_ptr + (m * tiles + tile).to(tl.int64) * SPLIT_K * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(slots + split * BLOCK_N, y)
        whole = arrived_last(counters_ptr + m * tiles + tile, SPLIT_K)
        if whole:
            y = tl.zeros((BLOCK_N,), tl.float32)
            for other in range(SPLIT_K):
                y += tl.load(slots + other * BLOCK_N, cache_modifier=".cg")
    if whole:
        if BIAS:
            y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@cache
def _constants(scheme: Scheme, dtype: torch.dtype, K: int, rows: int, share: int, ptx: bool) -> dict[str, object]:
    E = codes_per_step(scheme.bits)
    uniform = scheme.group_size == K or scheme.group_size % (rows * E * share) == 0
    asm, constraints = decode_ptx(scheme.bits, dtype, "raw", False) if ptx else ("", "")
    return {
        "BITS": scheme.bits,
        "GROUP_SIZE": scheme.group_size,
        "ZERO": scheme.zero,
        "UNIFORM": uniform,
        "HALF": not uniform and scheme.group_size % E != 0,
        "PTX": asm,
        "CONSTRAINTS": constraints,
        "EVEN_K": K % (rows * E * share) == 0,
    }


def launch(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N). config SPLIT_K 0 means one step (of SHARE blocks) a program."""
    M = x.shape[0]
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    facts = _constants(p.scheme, x.dtype, p.K, config["ROWS"], config["SHARE"], native_ptx(x))
    splits = config["SPLIT_K"] or triton.cdiv(p.K, config["ROWS"] * codes_per_step(p.scheme.bits) * config["SHARE"])
    tiles = triton.cdiv(p.N, config["BLOCK_N"])
    partials, slots = split_scratch(y, M * tiles, splits, config["BLOCK_N"])
    settings = {k: v for k, v in config.items() if k != "SPLIT_K"}
    grid = (tiles * splits * M,)
    more = launch_facts(x) | {"LOOP": config["SPLIT_K"] > 0, "SPLIT": splits > 1, "BIAS": bias is not None}
    _gemv_kernel[grid](*operands(x, p, bias, y), partials, slots, splits, **(facts | settings | more))
    return y


def refuse(call: Call, config: Config) -> str | None:
    """Why a config cannot run a call, or None."""
    codes = config["BLOCK_N"] * block_k(call, config) * config["SHARE"]
    if codes > MOST_CODES * 32 * config["num_warps"]:
        return f"{codes // (32 * config['num_warps'])} codes a thread and step; registers hold {MOST_CODES}"
    steps = triton.cdiv(call.K, block_k(call, config) * config["SHARE"])
    return "fewer steps of k than splits" if config["SPLIT_K"] > steps else None


KEYS = ("BLOCK_N", "ROWS", "SPLIT_K", "num_warps", "num_stages", "SHARE")


def configs(*rows: tuple[int, ...], share: int = 1) -> tuple[Config, ...]:
    """Configs from (BLOCK_N, ROWS, SPLIT_K, num_warps, num_stages) each, SHARE steps under one load of scales."""
    return configs_of(KEYS, ((*row, share) for row in rows))


def default_config(call: Call, legal: list[Config]) -> Config:
    """The config without measurements: the one whose number of programs is nearest to that of the winners."""
    model = policy.model("triton/gemv_splitk", gpu.of(call.capability))
    return min(legal, key=lambda c: imbalance(call, c, model))


FACTS = {"layouts": ("strided",), "devices": ("cuda",), "m_range": (1, M_MAX), "config_refuse": refuse}
register(
    "triton/gemv_splitk",
    default_config=default_config,
    prefer=policy.prefers("triton/gemv_splitk"),
    rank=38,  # ahead of gemm_splitk where both are preferred, at M = 1: it won there at 4, 3, 2 and 1 bits
    configs=configs(
        (128, 32, 4, 4, 4), (32, 64, 4, 2, 4), (64, 64, 8, 4, 4), (256, 16, 2, 4, 4), (128, 16, 8, 2, 2), (64, 32, 16, 2, 2),
        (128, 16, 4, 2, 4), (256, 8, 8, 2, 4), (32, 64, 8, 2, 4), (64, 32, 1, 4, 4),
        (64, 64, 1, 4, 4), (64, 64, 2, 4, 4), (64, 64, 4, 4, 4),
    ),
    **FACTS,
)(launch)  # fmt: skip
