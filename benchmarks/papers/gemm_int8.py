"""triton/gemm_int8: activations rounded to int8 per token, codes widened to int8, multiplied by the int8 tensor cores.

Maths   y[m, n] = sx[m] * sum_g s[g, n] * (sum_k xq[m, k] * c[n, k] - z[g, n] * sum_k xq[m, k]) + bias[n],  k in group g
        c = q - c0, z = zero - c0: c0 is 128 at 8 bits (codes must fit int8), the zero itself where it is a constant, else 0.
        Both sums over a group are whole numbers, exact in int32; fp32 begins at the scale
Shapes  x (M, K) fp16 or bf16 · words (K * BITS / 32, N) int32, layout `strided` · scales, zeros (K // group_size, N) · y (M, N)
Launch  _rows_kernel: one program quantizes one row and adds up each BLOCK_K of it; then _gemm_kernel
Grid    (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N) * SPLIT_K,), as triton/gemm; partial sums meet as partial.py says
Limits  BLOCK_K divides group_size and K; 8, 4, 2 bits
Speed   2.2 to 3.3 times slower on an H100 than rounding x and multiplying in 16 bits from `tile` (docs/fp8.md).
        Codes reach the tensor cores by way of shared memory, and every group's sums are converted to fp32
Source  own; A8Wn of GemLite
"""

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.dispatch.registry import Call, Config, configs_of
from lowq_kernels.products.triton.decode import interleaved, plain_code
from lowq_kernels.products.triton.partial import split_scratch, store_split_tile
from lowq_packers.fp8 import LEAST
from lowq_packers.layouts import PackedWeight
from papers import paper

_LEAST = tl.constexpr(LEAST)
INT8_MAX = tl.constexpr(127.0)


@triton.jit
def _rounded(x):
    """fp32 -> the nearest whole number, ties to even: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _rows_kernel(x_ptr, q_ptr, s_ptr, sums_ptr, M, K, BLOCK_K: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, STEP)
    running = tl.zeros((STEP,), tl.float32)
    for k0 in range(0, K, STEP):
        x = tl.load(x_ptr + row * K + k0 + offs, mask=k0 + offs < K, other=0.0, eviction_policy="evict_last")
        running = tl.maximum(running, tl.abs(x).to(tl.float32))
    amax = tl.maximum(tl.max(running, 0), _LEAST)
    inverse = tl.math.div_rn(INT8_MAX, amax)
    for k0 in range(0, K, STEP):
        x = tl.load(x_ptr + row * K + k0 + offs, mask=k0 + offs < K, other=0.0).to(tl.float32)
        q = tl.clamp(_rounded(x * inverse), -INT8_MAX, INT8_MAX)
        tl.store(q_ptr + row * K + k0 + offs, q.to(tl.int8), mask=k0 + offs < K)
        sums = tl.sum(tl.reshape(q, (STEP // BLOCK_K, BLOCK_K)), 1)
        blocks = k0 // BLOCK_K + tl.arange(0, STEP // BLOCK_K)
        tl.store(sums_ptr + blocks.to(tl.int64) * M + row, sums, mask=blocks < tl.cdiv(K, BLOCK_K))
    tl.store(s_ptr + row, tl.math.div_rn(amax, INT8_MAX))


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    q_ptr, s_ptr, sums_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, K, partials_ptr, counters_ptr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = 32 // BITS
    ROWS: tl.constexpr = BLOCK_K // E
    MID: tl.constexpr = 1 << (BITS - 1)
    C0: tl.constexpr = MID if BITS == 8 or ZERO == "none" else 0
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles = tiles_m * tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    offs_m = (tile % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    steps = K // BLOCK_K
    share = tl.cdiv(steps, SPLIT_K)
    first = split * share
    last = tl.minimum(steps, first + share)
    stride = tl.cast(N, tl.int64)
    x_ptrs = q_ptr + offs_m[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    words_ptrs = words_ptr + tl.arange(0, ROWS)[:, None] * stride + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        words = tl.load(words_ptrs + step * ROWS * stride, mask=mask_n[None, :], other=0)
        x = tl.load(x_ptrs + step * BLOCK_K, mask=mask_m[:, None], other=0)
        meta = step * BLOCK_K // GROUP_SIZE * stride + offs_n
        scales = tl.load(scales_ptr + meta, mask=mask_n, other=0.0).to(tl.float32)
        codes = ()
        for j in tl.static_range(E):
            codes = codes + ((plain_code(words, words, words, j, BITS) - C0).to(tl.int8),)
        w = interleaved(codes, ROWS, BLOCK_N, E)
        if TRANSPOSED:
            part = tl.trans(tl.dot(tl.trans(w), tl.trans(x), out_dtype=tl.int32))
        else:
            part = tl.dot(x, w, out_dtype=tl.int32)
        total = part.to(tl.float32)
        if ZERO != "none":
            zeros = tl.load(zeros_ptr + meta, mask=mask_n, other=0.0).to(tl.float32) - C0
            sums = tl.load(sums_ptr + tl.cast(step, tl.int64) * M + offs_m, mask=mask_m, other=0.0)
            total -= sums[:, None] * zeros[None, :]
        acc += total * scales[None, :]
    acc *= tl.load(s_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    store_split_tile(
        acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, tile, split, partials_ptr, counters_ptr, BIAS, BLOCK_M, BLOCK_N, SPLIT_K
    )


def quantize_rows(x: torch.Tensor, block_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, K) contiguous -> int8 (M, K), scales (M,), and fp32 sums of every block_k of a row (cdiv(K, block_k), M).

    The codes and scales of `lowq_kernels.activations.int8_rows`.
    """
    M, K = x.shape
    q = torch.empty(M, K, dtype=torch.int8, device=x.device)
    s = torch.empty(M, dtype=torch.float32, device=x.device)
    sums = torch.empty(triton.cdiv(K, block_k), M, dtype=torch.float32, device=x.device)
    step = max(block_k, min(4096, triton.next_power_of_2(K)))
    if M:  # no fma of `x * inverse` and the number that rounds it: it would round once where the definition rounds twice
        warps = 8 if step >= 4096 else 4
        _rows_kernel[(M,)](x, q, s, sums, M, K, BLOCK_K=block_k, STEP=step, num_warps=warps, enable_fp_fusion=False)
    return q, s, sums


KEYS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "TRANSPOSED", "num_warps", "num_stages")
CONFIGS = configs_of(KEYS, (
    (128, 128, 128, 1, 0, 8, 3), (128, 128, 64, 1, 0, 8, 3), (128, 128, 128, 1, 1, 8, 3), (128, 64, 128, 1, 0, 4, 3),
    (128, 256, 64, 1, 0, 8, 3), (64, 128, 64, 1, 0, 4, 3), (64, 128, 128, 4, 0, 4, 3), (64, 64, 128, 4, 0, 4, 3),
    (64, 64, 64, 2, 0, 4, 3), (64, 128, 128, 2, 1, 4, 3), (16, 64, 128, 4, 0, 4, 4), (16, 128, 64, 8, 0, 4, 4),
    (16, 64, 32, 4, 0, 4, 4), (128, 128, 32, 1, 0, 8, 3),
))  # fmt: skip


def _config_refuse(call: Call, config: Config) -> str | None:
    if call.scheme.group_size % config["BLOCK_K"] or call.K % config["BLOCK_K"]:
        return f"a step of {config['BLOCK_K']} does not divide the group"
    if config["SPLIT_K"] > call.K // config["BLOCK_K"]:
        return "fewer steps of k than splits"
    return None


def _default_config(call: Call, legal: list[Config]) -> Config:
    wanted = 2 * gpu.of(call.capability).sms  # programs

    def cost(c: Config) -> float:
        padded = triton.cdiv(call.M, c["BLOCK_M"]) * c["BLOCK_M"]
        programs = padded // c["BLOCK_M"] * triton.cdiv(call.N, c["BLOCK_N"]) * c["SPLIT_K"]
        return padded * (1 + 64 / c["BLOCK_M"]) * max(1.0, wanted / programs) * (1 + 16 / c["BLOCK_K"])

    return min(legal, key=cost)


@paper(
    "triton/gemm_int8",
    layouts=("strided",),
    bits=(8, 4, 2),
    acts=("int8",),
    min_capability=gpu.LEAST,
    configs=CONFIGS,
    config_refuse=_config_refuse,
    default_config=_default_config,
)
def gemm_int8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): x rounded to int8 per token, integer sums per group, scaled and added in fp32."""
    M, splits = x.shape[0], config["SPLIT_K"]
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    q, s, sums = quantize_rows(x, config["BLOCK_K"])
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(p.N, config["BLOCK_N"])
    partials, slots = split_scratch(y, tiles, splits, config["BLOCK_M"] * config["BLOCK_N"])
    zeros = p.scales if p.zeros is None else p.zeros
    _gemm_kernel[(tiles * splits,)](
        q, s, sums, p.words, p.scales, zeros, p.scales if bias is None else bias, y, M, p.N, p.K, partials, slots,
        BITS=p.scheme.bits, GROUP_SIZE=p.scheme.group_size, ZERO=p.scheme.zero, BIAS=bias is not None, **config,
    )  # fmt: skip
    return y
