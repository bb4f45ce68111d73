"""cuda/tile_wgmma: large M from the tile layout on Hopper. The kernel and its plan are described in tile_wgmma.cu.

A config: WARPGROUPS_N x WARPGROUPS_K consumer warpgroups of 64 rows of W each, those of N side by side (a tile is
64 * WARPGROUPS_N rows), those of K taking the steps in turn; BLOCK_M, rows of x of a tile; SPLIT_K, blocks of a cluster that
split K of one tile, for layers with fewer tiles than the GPU has SMs, or STREAM_K; BLOCKS_PER_SM: with two, the next kernel's
weights are on their way while this one's last sums are written.
"""

import ctypes
import math
from functools import cache
from types import SimpleNamespace

import torch

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import (
    SMEM_KEEPING_L1,
    TYPES,
    form,
    group_argument,
    groups_of_step,
    rows_of_x,
    scales_zeros_bias,
    share_of_block,
    straddled,
    tables_of,
    weight_maps,
    whole_product,
)
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import ANY_TABLE, Call, Config, configs_of, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, ROWS, WORDS, padded_rows

STREAM_K = 0  # a value of SPLIT_K: the steps of all tiles are shared evenly among all blocks
KEYS = ("WARPGROUPS_N", "WARPGROUPS_K", "BLOCK_M", "SPLIT_K", "BLOCKS_PER_SM")
CONFIGS = configs_of(KEYS, (
    (wn, wk, nb, k, blocks)
    for wn, wk, nb, splits, blocks in (
        (2, 1, 16, (1, STREAM_K, 2, 4), 2),
        (1, 2, 16, (STREAM_K,), 2),
        (4, 1, 16, (1, STREAM_K), 1),
        (2, 1, 32, (1, STREAM_K, 2, 4), 2),
        (1, 2, 32, (STREAM_K,), 2),
        (4, 1, 32, (1, STREAM_K), 1),
        (2, 2, 32, (1, STREAM_K, 2), 1),
        (1, 4, 32, (1,), 1),
        (2, 1, 64, (1, STREAM_K, 2, 4), 2),
        (4, 1, 64, (1, STREAM_K), 1),
        (2, 2, 64, (1, STREAM_K, 2), 1),
        (1, 4, 64, (2,), 1),
        (4, 1, 128, (1, STREAM_K, 2), 1),
        (2, 1, 128, (1, STREAM_K, 2), 1),
        (2, 1, 256, (1, STREAM_K, 2), 1),
    )
    for k in splits
))  # fmt: skip
PARAMETERS = (
    (TensorMap,) * 4
    + (ctypes.c_void_p,) * 2
    + (ctypes.c_int32,) * 6
    + (ctypes.c_void_p,) * 4
    + (ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
)
UNGROUPED = (0, 0, 0)  # experts, valid and next of a product by one weight
MAX_STAGES = 8


def threads(config: Config) -> int:
    """Threads of a block: the producer's warpgroup and the consumers'."""
    return 128 * (1 + config["WARPGROUPS_N"] * config["WARPGROUPS_K"])


def allowed(config: Config) -> int:
    """Max. dynamic shared memory per block."""
    NB, blocks = config["BLOCK_M"], config["BLOCKS_PER_SM"]
    of_sm = gpu.HOPPER.smem_sm
    if blocks == 2 and NB == 16:
        of_sm = SMEM_KEEPING_L1[2]
    # two along K need four stages: with fewer, 8 bits at 4096x14336, M = 64, take 30.4 us instead of 26.8
    elif blocks == 1 and NB <= 64 and (NB, config["WARPGROUPS_K"]) != (64, 2):
        of_sm = SMEM_KEEPING_L1[1]
    return share_of_block(of_sm, blocks)


def batch(bits: int, group: int, kind: str, config: Config) -> tuple[int, int]:
    """(BATCH, BUFFERS): k16 fragments per batch of wgmma, and register buffers that alternate, as registers allow. From 128
    columns on, four warpgroups, or steps in turn, hide a warpgroup's wait for its own products."""
    if config["BLOCK_M"] < 128:
        if bits == 3 and config["BLOCK_M"] == 32 and config["BLOCKS_PER_SM"] == 2:
            return 4, 1
        short = config["BLOCK_M"] == 64 and bits == 1 and config["BLOCKS_PER_SM"] == 2
        return (2 if short or (config["BLOCK_M"] > 16 and long_steps(bits, group, config)) else 4), 2
    if config["BLOCK_M"] == 256:
        return (8, 1) if bits == 3 and "BOOK" in kind else (4, 2)
    tight = config["WARPGROUPS_N"] * config["WARPGROUPS_K"] == 4  # 112 registers, 64 of them sums
    four = CHUNK[bits] == 64 or (bits == 2 and config["SPLIT_K"] < 2)  # 2 bits spilled with two
    return (8 if not tight else 4 if four else 2), 1


def long_steps(bits: int, group: int, config: Config) -> bool:
    """Whether a step is 256 k: with few columns that halves the barriers, and rows of scales are 64 bytes (2 bits,
    28672 x 4096, M = 16: 17.3 -> 16.3 us). 8 bits lack the shared memory for it, small groups the registers."""
    few = config["BLOCK_M"] <= 32 or (config["BLOCK_M"] == 64 and config["WARPGROUPS_N"] == 4 and bits in (2, 3))
    return few and bits < 8 and group % 128 == 0


def chunks_of_step(bits: int, group: int, config: Config) -> int:
    """CHUNKS of a step, the unit that is loaded and waited for: 256 k, 128, or 64 or 128 for the widest tile."""
    if long_steps(bits, group, config):
        return 256 // CHUNK[bits]
    return 2 if CHUNK[bits] == 64 and config["BLOCK_M"] <= 128 else 1


def band(bits: int) -> int:
    """Rows of W whose tiles run at the same time, 64 tiles (8 bits: 32) by two (four) of x on an H100. 8192 rows of 28672x4096
    are 33 MB in 8 bits, more than L2 keeps: 328 us instead of 325 at M = 1024, 1312 instead of 1297 at M = 4096."""
    return 4096 if bits == 8 else 8192


def loaded_bytes(bits: int, group: int, kind: str, config: Config, rows: int) -> int:
    """Bytes of a step: `rows` rows of x, words, scales and zeros."""
    u, tiles = chunks_of_step(bits, group, config), 4 * config["WARPGROUPS_N"]
    each = 4 if kind == "1" else 1 if "SCALES" in kind else 2  # of a row's group
    metas = each * tiles * ROWS * groups_of_step(group, u * CHUNK[bits])
    return u * (rows * CHUNK[bits] * 2 + tiles * WORDS[bits] * 4) + metas


def stage_bytes(bits: int, group: int, kind: str, config: Config) -> int:
    """Shared memory of a stage."""
    return -(-loaded_bytes(bits, group, kind, config, config["BLOCK_M"]) // 1024) * 1024


def plan(bits: int, group: int, kind: str, config: Config) -> tuple[int, int]:
    """(stages, dynamic shared memory): as many stages as fit with the fp32 sums of the warpgroups along K and the staging of
    outputs, the same number for each of WK; under a split, sums and staging reuse the ring's memory."""
    stage, groups = stage_bytes(bits, group, kind, config), config["WARPGROUPS_N"] * config["WARPGROUPS_K"]
    split = config["SPLIT_K"] > 1
    staging = groups * min(32, config["BLOCK_M"]) * 72 * 2
    sums = groups * config["BLOCK_M"] * 256 if split or config["WARPGROUPS_K"] > 1 else 0
    others = 0 if split else sums + staging
    stages = min(MAX_STAGES, (allowed(config) - others) // stage) // config["WARPGROUPS_K"] * config["WARPGROUPS_K"]
    return stages, max(stages * stage + others, sums, staging)


def expression(bits: int, T: int, group: int, kind: str, config: Config, grouped: bool = False) -> str:
    """The template instance of tile_wgmma.cu. grouped: each tile of x has its own weight (tile_wgmma_grouped.py)."""
    stages, u, (fb, buf) = (
        plan(bits, group, kind, config)[0],
        chunks_of_step(bits, group, config),
        batch(bits, group, kind, config),
    )
    tile = f"{config['WARPGROUPS_N']}, {config['WARPGROUPS_K']}, {config['BLOCK_M']}, {u}, {fb}, {buf}"
    tail = f"{stages}, {max(config['SPLIT_K'], 1)}, {config['BLOCKS_PER_SM']}, {band(bits) // (64 * config['WARPGROUPS_N'])}"
    tail += ", true" if grouped else ""
    return f"tile_wgmma<{bits}, {T}, {group}, {kind}, {tile}, {tail}>"


def _steps(K: int, bits: int, group: int, config: Config) -> int:
    return math.ceil(K / (CHUNK[bits] * chunks_of_step(bits, group, config)))


def _tiles(call: Call, config: Config) -> int:
    return math.ceil(padded_rows(call.N) / (64 * config["WARPGROUPS_N"])) * math.ceil(call.M / config["BLOCK_M"])


def rows_of_tile(M: int, BLOCK_M: int) -> int:
    """Rows of x per tile: M divided evenly over the necessary tiles."""
    return math.ceil(M / math.ceil(M / BLOCK_M))


def schedule(tiles: int, steps: int, config: Config, slots: int) -> tuple[int, int]:
    """(blocks, whole): blocks per launch, and the number of tiles that one block computes whole; the steps of the other tiles
    are divided evenly among all blocks. slots: blocks that run at once."""
    if config["SPLIT_K"] > 1:
        return tiles * config["SPLIT_K"], tiles
    if config["SPLIT_K"] == STREAM_K:  # divides one to two tiles per block, or all tiles
        return min(slots, tiles * (steps // config["WARPGROUPS_K"])), max(tiles // slots - 1, 0) * slots
    return min(tiles, slots), tiles


def _config_refuse(call: Call, config: Config) -> str | None:
    bits, s = call.scheme.bits, call.scheme
    group = 0 if s.group_size == call.K else s.group_size
    stages, smem = plan(bits, group, form(s), config)
    if stages < 2 * config["WARPGROUPS_K"] or smem > allowed(config):
        return "too much shared memory"
    steps, tiles = _steps(call.K, bits, group, config), _tiles(call, config)
    slots = gpu.of(call.capability).sms * config["BLOCKS_PER_SM"]
    uneven = steps % config["WARPGROUPS_K"] != 0
    if uneven and config["SPLIT_K"] == 1 and tiles > slots:
        return "several tiles a block, and steps that the warpgroups along K cannot share evenly"
    if config["SPLIT_K"] > steps:
        return "nothing to split"
    if config["SPLIT_K"] == STREAM_K and (uneven or tiles % slots == 0):
        return "steps that blocks cannot share evenly, or nothing left to share"
    if config["SPLIT_K"] == STREAM_K and tiles > 8 * slots:
        return "over 8 waves: an uneven last one costs less than Stream-K's sums"
    if config["SPLIT_K"] == STREAM_K and tiles * steps // config["WARPGROUPS_K"] < slots:
        return "fewer steps than blocks"
    return None


def at_once(config: Config, on: gpu.Gpu) -> int:
    """Tiles that run at once: one per block or cluster. Two blocks per SM double the clusters of two, but not of four."""
    split, blocks = config["SPLIT_K"], config["BLOCKS_PER_SM"]
    return on.sms * blocks if split < 2 else on.clusters[split - 1] * (blocks if split == 2 else 1)


def estimate(call: Call, config: Config, on: gpu.Gpu, model: dict[str, float]) -> float:
    """Microseconds of a call in a decode step, by a model whose constants `benchmarks/ship.py` fits to measured times (94 cells
    on an H100, 8, 4 and 2 bits, 13 layers: its pick is within 0.8% of the best in their geometric mean, 7% at worst). A step of
    128 k takes a smooth maximum of its parts: tensor cores, issue slots of dequantising, loads of words and x; nothing beats
    reading the weights once."""
    WN, WK, NB, split, most, bits, M, c = *(config[k] for k in KEYS), call.scheme.bits, call.M, SimpleNamespace(**model)
    steps, tiles, slots, size = math.ceil(call.K / 128), _tiles(call, config), on.sms * most, WN * NB / 256
    blocks = tiles * split if split > 1 else min(tiles if split else tiles * steps, slots)
    beside = min(most, math.ceil(blocks / on.sms))  # blocks that do share an SM
    parts = (c.mma_cycles * WN * NB, c.dequant_cycles * WN, (WN * 1024 * bits + 256 * NB) / c.bytes_per_cycle)
    step = beside * sum(p**c.sharpness for p in parts) ** (1 / c.sharpness) / c.mhz
    step *= c.half_ring if bits == 8 and beside < most else 1  # half of an SM's ring, and stages twice as large
    end = size / beside + c.tile_us + (c.tile_us_along_k * WK**0.5 if WK > 1 and split < 2 else 0)
    far = c.far_from < M * call.K  # blocks at different k share no lines of L2: M = 4096, K = 14336: 687 us instead of 598
    if split == STREAM_K:
        whole = max(tiles // slots - 1, 0)
        run = (tiles - whole * slots) * steps / slots  # steps per block
        apart = c.far if far else c.stream_tiles_of_x if M > NB else c.stream_256_by_8_bits if (bits, NB) == (8, 256) else 1
        us = (whole * steps + run * apart) * step + end * (1 + whole + run / steps)
        us += c.stream_sums * size * max(steps / run, 1)
        one = c.stream_us_one_block if most == 1 else c.stream_us_two_warpgroups if WN == 2 else c.stream_us
        us += c.stream_us_tiles_of_x if M > NB else one
    else:
        us = math.ceil(tiles / max(at_once(config, on), 1)) * (math.ceil(steps / split) * step + end)
        if split > 1:
            start = c.split_us_one_block if most == 1 else c.split_us_pairs if split == 2 else c.split_us
            us = us * (c.far if far else 1) + c.split_sums * size * split + start
    us += c.start_us_wide if (WN, most) == (4, 1) and NB <= 32 else c.start_us
    us *= c.tile_256x128 if (WN, NB) == (4, 128) else c.four_along_k if (WK, NB) == (4, 32) else 1
    megabytes = call.N * call.K * (bits + c.bits_of_scales) / 8e6
    read = megabytes / c.tb_per_s + c.read_start_us if M <= NB else megabytes / c.tb_per_s_again
    # in whole steps two blocks an SM leave the next kernel less room than alone (2 bits, 16 rows: more: 1912 us, 1940 by one)
    in_step = c.two_blocks_in_steps if most == 2 and (M > 16 or bits >= 4) else 1
    return in_step * (us**8 + read**8) ** 0.125


def _default_config(call: Call, legal: list[Config]) -> Config:
    """The config with the least `estimate`, among those it was fitted to. Splits only if one wave of clusters holds all tiles:
    6144 x 4096 at M = 1000 takes 85.2 us in three waves of pairs, 73.4 us with Stream-K."""
    on = gpu.of(call.capability)
    candidates = [c for c in legal if c["BLOCKS_PER_SM"] == 1 or c["BLOCK_M"] >= call.M]
    candidates = [c for c in candidates or legal if c["SPLIT_K"] < 2 or _tiles(call, c) <= at_once(c, on)]
    model = policy.model("cuda/tile_wgmma", on)
    return min(candidates or legal, key=lambda c: estimate(call, c, on, model))


@cache
def prepared(
    bits: int, T: int, group: int, kind: str, config: tuple[int, ...], device: int, grouped: bool = False
) -> tuple[Kernel, int]:
    """The kernel of a config (its values) and its shared memory, resolved once."""
    named: Config = dict(zip(KEYS, config, strict=True))
    smem = plan(bits, group, kind, named)[1]
    instance = expression(bits, T, group, kind, named, grouped)
    cluster = max(named["SPLIT_K"], 1)
    return Kernel("tile_wgmma.cu", instance, device, threads(named), PARAMETERS, smem, cluster, serialize=True), smem


@register(
    "cuda/tile_wgmma",
    layouts=("tile",),
    tables=ANY_TABLE,
    prefer=policy.prefers("cuda/tile_wgmma"),
    rank=18,
    configs=CONFIGS,
    refuse=lambda call: gpu.no_wgmma(call.capability),
    config_refuse=_config_refuse,
    default_config=_default_config,
)
def tile_wgmma(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): weights rounded once to x's dtype, fp32 sums, rounded once."""
    M, bits = x.shape[0], p.scheme.bits
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    if straddled(p):
        return whole_product(x, p, bias)
    x = rows_of_x(x)
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    group, T, kind = group_argument(p), scales.shape[0], form(p.scheme)
    kernel, smem = prepared(bits, TYPES[x.dtype], group, kind, tuple(config[k] for k in KEYS), x.device.index)
    tiles, K = 4 * config["WARPGROUPS_N"], x.shape[1]
    call_tiles, rows = math.ceil(T / tiles) * math.ceil(M / config["BLOCK_M"]), rows_of_tile(M, config["BLOCK_M"])
    steps = _steps(p.K, bits, group, config)
    blocks, whole = schedule(call_tiles, steps, config, gpu.here(x.device.index).sms * config["BLOCKS_PER_SM"])
    partials = flags = None
    if whole < call_tiles:
        partials = torch.empty(blocks * 64 * config["WARPGROUPS_N"] * config["BLOCK_M"], dtype=torch.float32, device=x.device)
        flags = counters(blocks * config["WARPGROUPS_N"] * config["WARPGROUPS_K"], x.device)
    step_k = CHUNK[bits] * chunks_of_step(bits, group, config)
    maps = (tensor_map(x.data_ptr(), 2, K, M, K * 2, (64, rows), True), *weight_maps(p, scales, zeros, group, step_k, tiles))
    sizes = (M, rows, loaded_bytes(bits, group, kind, config, rows), p.N, steps, whole)
    shared = (0 if partials is None else partials.data_ptr(), 0 if flags is None else flags.data_ptr())
    pointers = (0 if bias is None else bias.data_ptr(), y.data_ptr())
    books, each = tables_of(p)
    kernel(blocks, 1, smem, *maps, *pointers, *sizes, *shared, *UNGROUPED, 0 if books is None else books.data_ptr(), each)
    return y
