"""triton/fp8_gemm: products with e4m3 weights in Triton, data-parallel (SPLIT_K = 1) or SplitK, for every GPU with FP8.

Maths   y[m, n] = sum over k blocks of sx[m, b] * sw[n, b] * sum_k xq[m, k] * wq[n, k] + bias[n]
Shapes  xq (M, K) e4m3 · wq (N, K) e4m3 · y (M, N). Or x itself in fp16 or bf16: wq is then widened, exactly, and sx is 1
Scales  any blocks whose k is a multiple of BLOCK_K, or all of K; each k step's sums are scaled and added in fp32
Grid    (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N) * SPLIT_K,), tiles of m fastest; partial sums meet as in triton/partial.py
Source  own; SplitK as in products/triton/gemm.py
"""

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Config, configs_of, register
from lowq_kernels.fp8.call import Fp8Call
from lowq_kernels.products.triton.partial import split_scratch, store_split_tile
from lowq_packers.fp8 import Fp8Matrix


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr, w_ptr, xs_ptr, ws_ptr, bias_ptr, y_ptr, M, N, K, xs_m, xs_k, ws_n, ws_k, partials_ptr, counters_ptr,
    X_ROWS: tl.constexpr, X_K: tl.constexpr, W_ROWS: tl.constexpr, W_K: tl.constexpr, FP8: tl.constexpr, BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles = tiles_m * tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    offs_m = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    offs_k = tl.arange(0, BLOCK_K)
    k_range = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    k_begin = split * k_range
    k_end = tl.minimum(K, k_begin + k_range)
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]
    xs_ptrs, ws_ptrs = xs_ptr + offs_m // X_ROWS * xs_m, ws_ptr + offs_n // W_ROWS * ws_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(k_begin, k_end, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + k0, mask=mask_m[:, None], other=0.0)
            w = tl.load(w_ptrs + k0, mask=mask_n[None, :], other=0.0)
        else:
            inside = k0 + offs_k < K
            x = tl.load(x_ptrs + k0, mask=mask_m[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs + k0, mask=mask_n[None, :] & inside[:, None], other=0.0)
        part = tl.dot(x, w if FP8 else w.to(tl.float16).to(x.dtype))
        ws = tl.load(ws_ptrs + k0 // W_K * ws_k, mask=mask_n, other=0.0)
        if FP8:
            xs = tl.load(xs_ptrs + k0 // X_K * xs_k, mask=mask_m, other=0.0)
            acc += part * xs[:, None] * ws[None, :]
        else:
            acc += part * ws[None, :]
    store_split_tile(
        acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, tile, split, partials_ptr, counters_ptr, BIAS, BLOCK_M, BLOCK_N, SPLIT_K
    )


KEYS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K", "num_warps", "num_stages")
SPLITK_CONFIGS = configs_of(KEYS, (  # what won somewhere on an H100
    (16, 64, 128, 2, 4, 4), (16, 64, 128, 4, 4, 4), (16, 64, 128, 8, 4, 4), (16, 32, 128, 4, 4, 4),
    (64, 64, 128, 2, 4, 5), (64, 64, 128, 4, 4, 4),
))  # fmt: skip
GEMM_CONFIGS = configs_of(KEYS, ((64, 64, 128, 1, 4, 5), (64, 128, 128, 1, 4, 4), (128, 128, 128, 1, 8, 3)))
BLOCK_K = 128  # of every config


def config_for(M: int, N: int, K: int, on: gpu.Gpu | None = None) -> Config:
    """A config by rule: tiles that fit M, and the split that comes nearest to filling a GPU."""
    model = policy.model("triton/fp8_gemm", on or gpu.here())
    if M > 64:
        return GEMM_CONFIGS[2] if M > 128 else GEMM_CONFIGS[1]
    fitting = [
        c for c in (*SPLITK_CONFIGS, *GEMM_CONFIGS[:1]) if c["BLOCK_N"] == 64 and c["BLOCK_M"] == (16 if M <= 16 else 64)
    ]
    legal = [c for c in fitting if c["SPLIT_K"] <= max(1, K // model["least_k"])] or fitting[:1]
    return min(legal, key=lambda c: abs(model["programs"] - triton.cdiv(N, 64) * c["SPLIT_K"]))


def _refuse(call: Fp8Call) -> str | None:
    for name, block in (("x", call.x_block), ("W", call.w_block)):
        if block and block[1] % BLOCK_K and block[1] < call.K:
            return f"{name} has a scale per {block[0]}x{block[1]}; takes multiples of {BLOCK_K} along K"
    return None


@register(
    "triton/fp8_gemm",
    op="fp8_product",
    min_capability=gpu.since(lambda g: g.fp8),
    rank=20,
    prefer=lambda call: not call.widens,
    configs=SPLITK_CONFIGS + GEMM_CONFIGS,
    refuse=_refuse,
    default_config=lambda call, legal: config_for(call.M, call.N, call.K, gpu.of(call.capability)),
)
def fp8_gemm(
    x: Fp8Matrix | torch.Tensor, w: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, config: Config
) -> torch.Tensor:
    """x (M, K), quantized or in fp16 or bf16, @ W (N, K)^T + bias -> (M, N) in `dtype`."""
    q, xs, x_block = (x.q, x.scales, x.block) if isinstance(x, Fp8Matrix) else (x, w.scales, (1, 1))
    (M, K), N = q.shape, w.q.shape[0]
    y = torch.empty(M, N, dtype=dtype, device=q.device)
    splits = config["SPLIT_K"]
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
    partials, slots = split_scratch(y, tiles, splits, config["BLOCK_M"] * config["BLOCK_N"])
    strides = (xs.stride(0), xs.stride(1), w.scales.stride(0), w.scales.stride(1))
    _gemm_kernel[(tiles * splits,)](
        q, w.q, xs, w.scales, w.scales if bias is None else bias, y, M, N, K, *strides, partials, slots,
        X_ROWS=x_block[0], X_K=x_block[1], W_ROWS=w.block[0], W_K=w.block[1], FP8=isinstance(x, Fp8Matrix),
        BIAS=bias is not None, EVEN_K=K % config["BLOCK_K"] == 0, **config,
    )  # fmt: skip
    return y
