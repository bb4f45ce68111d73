"""cuda/tile_wgmma, grouped: rows of x sorted by expert, each tile multiplied by its expert's weight (tile_wgmma.cu)."""

import math

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda import driver
from lowq_kernels.cuda.operands import TYPES, form, group_argument, scales_zeros_bias, tables_of, weight_maps
from lowq_kernels.dispatch.registry import Config, configs_of
from lowq_kernels.products.cuda.tile_wgmma import (
    KEYS,
    allowed,
    chunks_of_step,
    loaded_bytes,
    plan,
    prepared,
)
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, ROWS, padded_rows
from lowq_packers.scheme import Scheme

# Rows of a tile of experts of 4 bits of which an average one has up to MEAN rows. us of a step by tiles of 16 rows (8), H200,
# 64 sequences: glm4_moe, three mixtures, 1404 (1331), qwen3_moe, four, 553 (541); 16 sequences: qwen3_moe 377 (361), gpt_oss,
# four of tables, 629 (598). Blocks that divide the steps of the last tiles gained at most 1%.
FEW, MEAN = 8, 4
CONFIGS: dict[int, Config] = {  # rows of x per tile -> config
    c["BLOCK_M"]: c
    for c in configs_of(KEYS, (
        (2, 1, FEW, 1, 2), (2, 1, 16, 1, 2), (2, 1, 32, 1, 2), (2, 1, 64, 1, 2), (2, 1, 128, 1, 1), (2, 1, 256, 1, 1),
    ))
}  # fmt: skip


def block(rows: int, experts: int, bits: int) -> int:
    """Rows per tile for this many rows in all: what an average expert fills, so that there is little padding."""
    mean, few = rows / experts, ((FEW, MEAN),) if bits == 4 else ()
    return next((size for size, most in (*few, (16, 8), (32, 24), (64, 64), (128, 384)) if mean <= most), 256)


def why_not(scheme: Scheme, K: int, layout: str, capability: tuple[int, int]) -> str | None:
    """Why the kernel does not take such weights, or None."""
    if (why := gpu.no_wgmma(capability)) or layout != "tile" or K % 8:
        return why or f"takes the layout tile and whole eights of k, not {layout} and {K}"
    group = 0 if scheme.group_size == K else scheme.group_size
    for config in CONFIGS.values():
        stages, smem = plan(scheme.bits, group, form(scheme), config)
        if stages < 2 or smem > allowed(config):
            return "too much shared memory"
    return None


def grouped(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, N: int, rows: int, experts: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """x (P, K) fp16 or bf16, tile i of `rows` of its rows times the weight of expert experts[i], plus its bias -> (P, N).

    Args:
        p: the weights (N, K) of E experts in layout tile as one of E * N rows; bias (E, N).
        rows: of a tile, one of CONFIGS; P is a multiple of it.
        experts: (P / rows,) int32. valid: (1,) int32, how many rows there are; those after them stay unwritten.
    """
    P, bits, config = x.shape[0], p.scheme.bits, CONFIGS[rows]
    y = torch.empty(P, N, dtype=x.dtype, device=x.device)
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    group, T = group_argument(p), TYPES[x.dtype]
    kind = form(p.scheme)
    kernel, smem = prepared(bits, T, group, kind, tuple(config.values()), x.device.index, grouped=True)
    tiles, u = 4 * config["WARPGROUPS_N"], chunks_of_step(bits, group, config)
    all_tiles = math.ceil(padded_rows(N) / (ROWS * tiles)) * (P // rows)
    x_map = driver.tensor_map(x.data_ptr(), 2, p.K, P, p.K * 2, (64, rows), True)
    maps = (x_map, *weight_maps(p, scales, zeros, group, CHUNK[bits] * u, tiles))
    loaded, steps = loaded_bytes(bits, group, kind, config, rows), math.ceil(p.K / (CHUNK[bits] * u))
    sizes, shared = (P, rows, loaded, N, steps, all_tiles), (0, 0)  # no tile is
    blocks = min(all_tiles, gpu.here(x.device.index).sms * config["BLOCKS_PER_SM"])
    of_experts = (experts.data_ptr(), valid.data_ptr(), padded_rows(N) // ROWS)
    books, each = tables_of(p)
    pointers = (0 if bias is None else bias.data_ptr(), y.data_ptr())
    kernel(blocks, 1, smem, *maps, *pointers, *sizes, *shared, *of_experts, 0 if books is None else books.data_ptr(), each)
    return y
