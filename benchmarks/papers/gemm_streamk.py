"""triton/gemm_streamk: the steps of all tiles laid end to end and cut into equal ranges, one per program.

Maths   y = x @ W^T + bias, as in product.py
Grid    (P,), P = PROGRAMS per multiprocessor, whatever the shape: no last wave that leaves the chip half idle
Range   program p takes steps p * T // P .. (p + 1) * T // P of the T = tiles * steps; it meets at most one tile it did not
        start and one it does not finish. Those go to slots 2p and 2p + 1 and are added in the order of p (partial.py)
Source  Stream-K: Osama et al. 2023 (arXiv:2301.03598); for W4A16 the "future direction" of arXiv:2402.00025
"""

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.dispatch.registry import Config, configs_of
from lowq_kernels.products.triton.decode import codes_per_step
from lowq_kernels.products.triton.fit import closest_config, tile_refusal
from lowq_kernels.products.triton.overlap import overlap_previous
from lowq_kernels.products.triton.partial import arrived_last, get_partial, put_partial, store_tile
from lowq_kernels.products.triton.product import constants, launch_facts, native_ptx, operands, tile_product
from lowq_packers.layouts import PackedWeight
from papers import paper

CPU_PROCESSORS = 3  # what the interpreter pretends to have: enough for tiles shared by several programs


@triton.jit(do_not_specialize=["M"])
def _streamk_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, K, partials_ptr, counters_ptr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr, UNIFORM: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ROWS: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr, NATURAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_K: tl.constexpr = ROWS * (32 if BITS == 3 else 32 // BITS)
    p = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    total = tl.cast(tiles_m * tl.cdiv(N, BLOCK_N), tl.int64) * steps
    step = p * total // programs
    end = (p + 1) * total // programs
    if PDL:
        row = (step % steps).to(tl.int32) * BLOCK_K * BITS // 32
        column = (step // steps // tiles_m).to(tl.int32) * BLOCK_N
        overlap_previous(words_ptr, row, tl.cdiv(K * BITS, 32), column, N, BLOCK_N)
    while step < end:
        tile = step // steps
        first = (step % steps).to(tl.int32)
        last = tl.minimum(steps, first + end - step).to(tl.int32)
        offs_m = (tile % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (tile // tiles_m).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tile_product(
            x_ptr, words_ptr, scales_ptr, zeros_ptr, M, N, K, offs_m, offs_n,
            first * BLOCK_K, tl.minimum(K, last * BLOCK_K),
            BITS, GROUP_SIZE, ZERO, SCALE, UNIFORM, PTX, CONSTRAINTS, ROWS, EVEN_K, BLOCK_M, BLOCK_N, TRANSPOSED, NATURAL,
        )  # fmt: skip
        if TRANSPOSED:
            acc = tl.trans(acc)
        if first == 0 and last == steps:
            store_tile(acc, bias_ptr, y_ptr, M, N, offs_m, offs_n, BIAS)
        else:
            SLOT: tl.constexpr = BLOCK_M * BLOCK_N
            mine = 2 * p + (1 if first == 0 else 0)
            put_partial(acc, partials_ptr + mine.to(tl.int64) * SLOT, offs_m, M, BLOCK_M, BLOCK_N)
            # the program that holds step s is ((s + 1) * programs - 1) // total
            head = ((tile * steps + 1) * programs - 1) // total
            tail = ((tile + 1) * steps * programs - 1) // total
            if arrived_last(counters_ptr + tile, (tail - head + 1).to(tl.int32)):
                sums = get_partial(partials_ptr + (2 * head + 1) * SLOT, offs_m, M, BLOCK_M, BLOCK_N)
                for other in range(head + 1, tail + 1):
                    sums += get_partial(partials_ptr + 2 * other * SLOT, offs_m, M, BLOCK_M, BLOCK_N)
                store_tile(sums, bias_ptr, y_ptr, M, N, offs_m, offs_n, BIAS)
        step += last - first


def _launch(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N)."""
    M, BLOCK_M, BLOCK_N = x.shape[0], config["BLOCK_M"], config["BLOCK_N"]
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    facts = constants(p.scheme, x.dtype, p.K, config["ROWS"], BLOCK_M, native_ptx(x))
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(p.N, BLOCK_N)
    E = codes_per_step(p.scheme.bits)
    sms = gpu.here(x.device.index).sms if x.is_cuda else CPU_PROCESSORS
    programs = min(sms * config["PROGRAMS"], tiles * triton.cdiv(p.K, config["ROWS"] * E))
    partials = torch.empty(2 * programs * BLOCK_M * BLOCK_N, dtype=torch.float32, device=x.device)
    settings = {k: v for k, v in config.items() if k != "PROGRAMS"}
    more = launch_facts(x) | {"BIAS": bias is not None}
    _streamk_kernel[(programs,)](*operands(x, p, bias, y), partials, counters(tiles, x.device), **(facts | settings | more))
    return y


KEYS = ("BLOCK_M", "BLOCK_N", "ROWS", "PROGRAMS", "TRANSPOSED", "NATURAL", "num_warps", "num_stages")
paper(
    "triton/gemm_streamk",
    layouts=("strided",),
    configs=configs_of(KEYS, (
        (16, 64, 16, 4, 0, 0, 4, 3), (16, 64, 16, 2, 0, 0, 4, 3), (16, 128, 16, 2, 0, 0, 4, 3), (8, 64, 16, 4, 1, 0, 4, 3),
        (16, 64, 4, 4, 0, 1, 4, 3), (64, 64, 8, 2, 0, 1, 4, 3), (64, 64, 4, 2, 0, 1, 4, 3), (64, 128, 16, 1, 1, 0, 8, 3),
        (64, 128, 8, 2, 0, 1, 4, 3), (128, 128, 8, 1, 0, 1, 8, 3), (128, 128, 4, 1, 0, 1, 8, 3), (128, 128, 2, 1, 0, 1, 8, 3),
    )),
    config_refuse=tile_refusal,
    default_config=closest_config,
)(_launch)  # fmt: skip
