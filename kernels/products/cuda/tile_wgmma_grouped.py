"""cuda/tile_wgmma, grouped: rows of x sorted by expert, each tile of them times its own expert's weight (tile_wgmma.cu)."""

import math

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda import driver
from lowq_kernels.cuda.operands import TYPES, group_argument, scales_zeros_bias, weight_maps
from lowq_kernels.dispatch.registry import Config, configs_of
from lowq_kernels.products.cuda.tile_wgmma import (
    KEYS,
    allowed,
    chunks_of_step,
    form,
    loaded_bytes,
    plan,
    prepared,
    tables_of,
)
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, ROWS, padded_rows
from lowq_packers.scheme import Scheme

CONFIGS: dict[int, Config] = {  # rows of a tile of x -> config
    c["BLOCK_M"]: c
    for c in configs_of(KEYS, ((2, 1, 16, 1, 2), (2, 1, 32, 1, 2), (2, 1, 64, 1, 2), (2, 1, 128, 1, 1), (2, 1, 256, 1, 1)))
}


def block(rows: int, experts: int) -> int:
    """Rows of a tile for so many rows in all: what a mean expert fills, so that little is padding."""
    mean = rows / experts
    return next((size for size, most in ((16, 8), (32, 24), (64, 64), (128, 384)) if mean <= most), 256)


def why_not(scheme: Scheme, K: int, layout: str, capability: tuple[int, int]) -> str | None:
    """The reason that such weights are not taken, or None."""
    if (why := gpu.no_wgmma(capability)) or layout != "tile" or K % 8:
        return why or f"takes the layout tile and whole eights of k, not {layout} and {K}"
    group = 0 if scheme.group_size == K else scheme.group_size
    for config in CONFIGS.values():
        stages, smem = plan(scheme.bits, group, form(scheme), config)
        if stages < 2 or smem > allowed(config):
            return "too much shared memory"
    return None


def grouped(x: torch.Tensor, p: PackedWeight, rows: int, experts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """x (P, K) fp16 or bf16, tile i of `rows` of its rows times the weight of expert experts[i] -> (P, N).

    Args:
        p: all experts' weights (N, K) in layout tile, one after another: words (E * N' / 16, ...), scales and zeros likewise.
        rows: of a tile, one of CONFIGS; P is a multiple of it.
        experts: (P / rows,) int32. valid: (1,) int32, how many rows there are; those after them stay unwritten.
    """
    P, bits, config = x.shape[0], p.scheme.bits, CONFIGS[rows]
    y = torch.empty(P, p.N, dtype=x.dtype, device=x.device)
    scales, zeros, _ = scales_zeros_bias(p, None, x.dtype)
    group, T = group_argument(p), TYPES[x.dtype]
    kind = form(p.scheme)
    kernel, smem = prepared(bits, T, group, kind, tuple(config.values()), x.device.index, grouped=True)
    tiles, u = 4 * config["WARPGROUPS_N"], chunks_of_step(bits, group, config)
    all_tiles = math.ceil(padded_rows(p.N) / (ROWS * tiles)) * (P // rows)
    x_map = driver.tensor_map(x.data_ptr(), 2, p.K, P, p.K * 2, (64, rows), True)
    maps = (x_map, *weight_maps(p, scales, zeros, group, CHUNK[bits] * u, tiles))
    loaded, steps = loaded_bytes(bits, group, kind, config, rows), math.ceil(p.K / (CHUNK[bits] * u))
    sizes, shared = (P, rows, loaded, p.N, steps, all_tiles), (0, 0)  # no tile is
    of_experts = (experts.data_ptr(), valid.data_ptr(), padded_rows(p.N) // ROWS)
    blocks = min(all_tiles, gpu.here(x.device.index).sms * config["BLOCKS_PER_SM"])
    own, each = tables_of(p, p.N * p.words.shape[0] // (padded_rows(p.N) // ROWS))
    kernel(blocks, 1, smem, *maps, 0, y.data_ptr(), *sizes, *shared, *of_experts, 0 if own is None else own.data_ptr(), each)
    return y
