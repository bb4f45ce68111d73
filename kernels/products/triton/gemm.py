"""triton/gemm and triton/gemm_splitk: one program = one tile of y over all of K, or over one of SPLIT_K ranges of it.

Maths   y[m, n] = sum_k x[m, k] * (q[n, k] - z[n, g]) * s[n, g] + bias[n],  g = k // group_size
Shapes  as in product.py; y (M, N), dtype of x
Grid    (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N) * SPLIT_K,), tiles of m fastest: neighbours share their weights in the cache
Split   ranges are whole steps; partial sums meet as partial.py says. SPLIT_K = 1 is the data-parallel kernel
Source  SplitK for W4A16: Hoque et al. 2024 (arXiv:2402.00025), with an ordered reduction in place of their atomics
"""

import torch
import triton
import triton.language as tl

from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config, configs_of, register
from lowq_kernels.products.triton.fit import closest_config, tile_refusal
from lowq_kernels.products.triton.overlap import overlap_previous
from lowq_kernels.products.triton.partial import split_scratch, store_split_tile
from lowq_kernels.products.triton.product import (
    block_k,
    constants,
    launch_facts,
    native_ptx,
    operands,
    tile_product,
)
from lowq_packers.layouts import PackedWeight


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, K, partials_ptr, counters_ptr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, UNIFORM: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ROWS: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, TRANSPOSED: tl.constexpr,
    NATURAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_K: tl.constexpr = ROWS * (32 if BITS == 3 else 32 // BITS)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles = tiles_m * tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    offs_m = (tile % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    k_begin = split * k_range
    k_end = tl.minimum(K, k_begin + k_range)
    if PDL:
        overlap_previous(words_ptr, k_begin * BITS // 32, tl.cdiv(k_end * BITS, 32), (tile // tiles_m) * BLOCK_N, N, BLOCK_N)
    acc = tile_product(
        x_ptr, words_ptr, scales_ptr, zeros_ptr, M, N, K, offs_m, offs_n, k_begin, k_end,
        BITS, GROUP_SIZE, ZERO, SCALE, UNIFORM, PTX, CONSTRAINTS, ROWS, EVEN_K, BLOCK_M, BLOCK_N, TRANSPOSED, NATURAL,
    )  # fmt: skip
    if TRANSPOSED:
        acc = tl.trans(acc)
    store_split_tile(
        acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, tile, split, partials_ptr, counters_ptr, BIAS, BLOCK_M, BLOCK_N, SPLIT_K
    )


def _launch(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N)."""
    M = x.shape[0]
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(p.N, config["BLOCK_N"])
    splits = config["SPLIT_K"]
    partials, slots = split_scratch(y, tiles, splits, config["BLOCK_M"] * config["BLOCK_N"])
    facts = constants(p.scheme, x.dtype, p.K, config["ROWS"], config["BLOCK_M"], native_ptx(x))
    settings = facts | config | launch_facts(x) | {"BIAS": bias is not None}
    _gemm_kernel[(tiles * splits,)](*operands(x, p, bias, y), partials, slots, **settings)
    return y


def _refuse(call: Call, config: Config) -> str | None:
    if reason := tile_refusal(call, config):
        return reason
    if config["SPLIT_K"] > triton.cdiv(call.K, block_k(call, config)):
        return "fewer steps of k than splits"
    return None


KEYS = ("BLOCK_M", "BLOCK_N", "ROWS", "SPLIT_K", "TRANSPOSED", "NATURAL", "num_warps", "num_stages")
# Both lists: configs that won somewhere in benchmarks/once/triton_sweep.py on an H100, and a few for smaller GPUs.
SPLITK_CONFIGS = configs_of(KEYS, (
    (16, 64, 16, 4, 0, 0, 4, 3), (16, 64, 16, 8, 0, 0, 4, 3), (16, 64, 16, 2, 0, 0, 4, 3), (16, 64, 16, 2, 0, 0, 2, 3),
    (16, 64, 16, 4, 0, 0, 2, 4), (16, 64, 16, 16, 0, 0, 4, 2), (16, 32, 16, 8, 0, 0, 2, 3),
    (16, 128, 16, 8, 0, 0, 4, 3), (16, 128, 16, 4, 0, 0, 4, 3), (16, 128, 16, 2, 0, 0, 4, 3), (16, 128, 16, 4, 0, 0, 8, 3),
    (8, 64, 16, 8, 1, 0, 4, 3), (8, 128, 16, 4, 1, 0, 4, 3),
    (16, 64, 32, 8, 0, 0, 4, 3), (16, 64, 32, 2, 0, 0, 4, 3),
    (16, 64, 4, 8, 0, 1, 4, 3), (16, 64, 8, 4, 0, 1, 4, 3),
    (32, 64, 16, 4, 0, 0, 4, 3), (32, 64, 16, 2, 0, 0, 4, 3), (32, 128, 16, 4, 0, 0, 8, 3),
    (64, 128, 16, 4, 1, 0, 8, 3), (64, 128, 16, 8, 1, 0, 8, 2), (64, 64, 4, 4, 0, 1, 4, 3), (64, 64, 8, 8, 0, 1, 4, 3),
    (64, 128, 4, 4, 0, 1, 8, 3), (64, 128, 8, 4, 0, 1, 8, 3), (64, 128, 16, 4, 0, 1, 8, 3),
    (128, 128, 8, 2, 0, 1, 8, 3), (128, 128, 4, 2, 0, 1, 8, 3), (128, 128, 2, 2, 0, 1, 4, 3),
))  # fmt: skip
GEMM_CONFIGS = configs_of(KEYS, (
    (16, 64, 16, 1, 0, 0, 4, 3), (16, 128, 16, 1, 0, 0, 4, 3), (8, 64, 16, 1, 1, 0, 4, 3), (16, 64, 4, 1, 0, 1, 4, 3),
    (32, 64, 16, 1, 0, 0, 4, 3), (32, 128, 16, 1, 0, 0, 4, 3),
    (64, 128, 16, 1, 1, 0, 4, 3), (64, 128, 16, 1, 0, 1, 4, 3), (64, 128, 8, 1, 0, 1, 4, 3), (64, 128, 4, 1, 0, 1, 8, 3),
    (64, 128, 8, 1, 1, 1, 4, 3), (64, 64, 4, 1, 0, 1, 4, 3),
    (128, 128, 16, 1, 0, 1, 8, 3), (128, 128, 8, 1, 0, 1, 4, 3), (128, 128, 8, 1, 0, 1, 8, 3), (128, 128, 4, 1, 0, 1, 8, 4),
    (128, 128, 2, 1, 0, 1, 4, 3), (128, 64, 16, 1, 0, 1, 4, 3), (128, 64, 4, 1, 0, 1, 4, 3),
    (256, 128, 8, 1, 0, 1, 8, 3), (256, 128, 4, 1, 0, 1, 8, 3), (256, 128, 2, 1, 0, 1, 8, 3),
))  # fmt: skip
_FACTS = {"layouts": ("strided",), "devices": ("cuda",), "config_refuse": _refuse, "default_config": closest_config}
register("triton/gemm_splitk", prefer=policy.prefers("triton/gemm_splitk"), rank=40, configs=SPLITK_CONFIGS, **_FACTS)(_launch)
register("triton/gemm", prefer=policy.prefers("triton/gemm"), rank=50, configs=GEMM_CONFIGS, **_FACTS)(_launch)
