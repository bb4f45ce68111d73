"""cuda/tile_wgmma: large M from the tile layout on Hopper. The kernel and its plan are described in tile_wgmma.cu.

A config: WN x WK consumer warpgroups of 64 rows of W each, WN side by side along N (a tile is 64 * WN rows), WK taking the
steps along K in turn; NB, rows of x of a tile; SPLIT, blocks of a cluster that split K of one tile, for layers with fewer
tiles than the GPU has SMs, or SHARED_OUT: all blocks get equal runs of the steps of all tiles; BLOCKS that fit an SM: with two,
the next kernel's weights are on their way while this one's last sums are written.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import (
    SMEM_KEEPING_L1,
    TYPES,
    companions,
    group_argument,
    groups_of_step,
    rows_of_x,
    share_of_block,
    weight_maps,
)
from lowq_kernels.dispatch.registry import Call, Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, WORDS, padded_rows

SHARED_OUT = 0  # a SPLIT
KEYS = ("WN", "WK", "NB", "SPLIT", "BLOCKS")
CONFIGS: tuple[Config, ...] = tuple(
    dict(zip(KEYS, (wn, wk, nb, k, blocks), strict=True))
    for wn, wk, nb, splits, blocks in (
        (2, 1, 16, (1, SHARED_OUT, 2, 4), 2),
        (1, 2, 16, (SHARED_OUT,), 2),
        (4, 1, 16, (1, SHARED_OUT), 1),
        (2, 1, 32, (1, SHARED_OUT, 2, 4), 2),
        (1, 2, 32, (SHARED_OUT,), 2),
        (4, 1, 32, (1, SHARED_OUT), 1),
        (2, 2, 32, (1, SHARED_OUT, 2), 1),
        (1, 4, 32, (1,), 1),
        (2, 1, 64, (1, SHARED_OUT, 2, 4), 2),
        (4, 1, 64, (1, SHARED_OUT), 1),
        (2, 2, 64, (1, SHARED_OUT, 2), 1),
        (1, 4, 64, (2,), 1),
        (4, 1, 128, (1, SHARED_OUT, 2), 1),
        (2, 1, 128, (1, SHARED_OUT, 2), 1),
        (2, 1, 256, (1, SHARED_OUT, 2), 1),
    )
    for k in splits
)
PARAMETERS = (TensorMap,) * 4 + (ctypes.c_void_p,) * 2 + (ctypes.c_int32,) * 6 + (ctypes.c_void_p,) * 2
MAX_STAGES = 8


def threads(config: Config) -> int:
    """Threads of a block: the producer's warpgroup and the consumers'."""
    return 128 * (1 + config["WN"] * config["WK"])


def allowed(config: Config) -> int:
    """Dynamic shared memory that a block may ask for."""
    NB, blocks = config["NB"], config["BLOCKS"]
    of_sm = gpu.HOPPER.smem_sm
    if blocks == 2 and NB == 16:
        of_sm = SMEM_KEEPING_L1[2]
    # two along K need four stages: with fewer 8 bits at 4096x14336, M = 64, take 30.4 us for 26.8
    elif blocks == 1 and NB <= 64 and (NB, config["WK"]) != (64, 2):
        of_sm = SMEM_KEEPING_L1[1]
    return share_of_block(of_sm, blocks)


def batch(bits: int, group: int, config: Config) -> tuple[int, int]:
    """(FB, BUF): k16 fragments that go to wgmma together, and the register buffers they alternate between, as ptxas finds
    registers for. From 128 columns on four warpgroups, or steps in turn, hide a warpgroup's wait for its own products."""
    if config["NB"] < 128:
        if bits == 3 and config["NB"] == 32 and config["BLOCKS"] == 2:
            return 4, 1
        short = config["NB"] == 64 and bits == 1 and config["BLOCKS"] == 2
        return (2 if short or (config["NB"] > 16 and long_steps(bits, group, config)) else 4), 2
    if config["NB"] == 256:
        return 4, 2
    tight = config["WN"] * config["WK"] == 4  # 112 registers, 64 of them sums
    four = CHUNK[bits] == 64 or (bits == 2 and config["SPLIT"] < 2)  # 2 bits spilled with two
    return (8 if not tight else 4 if four else 2), 1


def long_steps(bits: int, group: int, config: Config) -> bool:
    """Whether a step is 256 k: where columns are few that halves barriers, and rows of scales are 64 bytes (2 bits,
    28672 x 4096, M = 16: 17.3 -> 16.3 us). 8 bits have too little shared memory for it, small groups too few registers."""
    few = config["NB"] <= 32 or (config["NB"] == 64 and config["WN"] == 4 and bits in (2, 3))
    return few and bits < 8 and group % 128 == 0


def chunks_of_step(bits: int, group: int, config: Config) -> int:
    """U: chunks of a step, the unit that is loaded and waited for: 256 k, 128, or 64 or 128 for the widest tile."""
    if long_steps(bits, group, config):
        return 256 // CHUNK[bits]
    return 2 if CHUNK[bits] == 64 and config["NB"] <= 128 else 1


def band(bits: int) -> int:
    """Rows of W whose tiles run side by side, 64 (8 bits: 32) by two (four) of x on an H100. 8192 rows of 28672x4096 are 33
    MB by 8 bits, which L2 does not keep: 328 us for 325 at M = 1024, 1312 for 1297 at 4096."""
    return 4096 if bits == 8 else 8192


def loaded_bytes(bits: int, group: int, zeros: bool, config: Config, rows: int) -> int:
    """Bytes of a step: `rows` rows of x, words, scales and zeros."""
    u, tiles = chunks_of_step(bits, group, config), 4 * config["WN"]
    metas = (2 if zeros else 1) * tiles * groups_of_step(group, u * CHUNK[bits]) * 32
    return u * (rows * CHUNK[bits] * 2 + tiles * WORDS[bits] * 4) + metas


def stage_bytes(bits: int, group: int, zeros: bool, config: Config) -> int:
    """Shared memory of a stage."""
    return -(-loaded_bytes(bits, group, zeros, config, config["NB"]) // 1024) * 1024


def plan(bits: int, group: int, zeros: bool, config: Config) -> tuple[int, int]:
    """(stages, dynamic shared memory): as many stages as fit beside the fp32 sums of the warpgroups along K and the staging
    of the outputs, the same number for each of WK; under a split sums and staging take the ring's place."""
    stage, groups = stage_bytes(bits, group, zeros, config), config["WN"] * config["WK"]
    split = config["SPLIT"] > 1
    staging = groups * min(32, config["NB"]) * 72 * 2
    sums = groups * config["NB"] * 256 if split or config["WK"] > 1 else 0
    beside = 0 if split else sums + staging
    stages = min(MAX_STAGES, (allowed(config) - beside) // stage) // config["WK"] * config["WK"]
    return stages, max(stages * stage + beside, sums, staging)


def expression(bits: int, T: int, group: int, zeros: bool, config: Config) -> str:
    """The template instance of tile_wgmma.cu."""
    stages, u, (fb, buf) = plan(bits, group, zeros, config)[0], chunks_of_step(bits, group, config), batch(bits, group, config)
    tile = f"{config['WN']}, {config['WK']}, {config['NB']}, {u}, {fb}, {buf}"
    tail = f"{stages}, {max(config['SPLIT'], 1)}, {config['BLOCKS']}, {band(bits) // (64 * config['WN'])}"
    return f"tile_wgmma<{bits}, {T}, {group}, {'true' if zeros else 'false'}, {tile}, {tail}>"


def _steps(K: int, bits: int, group: int, config: Config) -> int:
    return math.ceil(K / (CHUNK[bits] * chunks_of_step(bits, group, config)))


def _tiles(call: Call, config: Config) -> int:
    return math.ceil(padded_rows(call.N) / (64 * config["WN"])) * math.ceil(call.M / config["NB"])


def rows_of_tile(M: int, NB: int) -> int:
    """Rows of x that each tile loads: M shared out evenly over as many tiles as are needed."""
    return math.ceil(M / math.ceil(M / NB))


def schedule(tiles: int, steps: int, config: Config, slots: int) -> tuple[int, int]:
    """(blocks, whole): blocks of a launch, and how many tiles they take whole; the others' steps are shared out evenly.
    slots: blocks that run at once."""
    if config["SPLIT"] > 1:
        return tiles * config["SPLIT"], tiles
    if config["SPLIT"] == SHARED_OUT:  # between one and two tiles a block, or all there are
        return min(slots, tiles * (steps // config["WK"])), max(tiles // slots - 1, 0) * slots
    return min(tiles, slots), tiles


def _config_refuse(call: Call, config: Config) -> str | None:
    bits, s = call.scheme.bits, call.scheme
    group = 0 if s.group_size == call.K else s.group_size
    stages, smem = plan(bits, group, s.zero != "none", config)
    if stages < 2 * config["WK"] or smem > allowed(config):
        return "too much shared memory"
    steps, tiles = _steps(call.K, bits, group, config), _tiles(call, config)
    slots = gpu.of(call.capability).sms * config["BLOCKS"]
    uneven = steps % config["WK"] != 0
    if uneven and config["SPLIT"] == 1 and tiles > slots:
        return "several tiles a block, and steps that the warpgroups along K cannot share evenly"
    if config["SPLIT"] > steps:
        return "nothing to split"
    if config["SPLIT"] == SHARED_OUT and (uneven or tiles % slots == 0):
        return "steps that blocks cannot share evenly, or nothing left to share"
    if config["SPLIT"] == SHARED_OUT and tiles > 8 * slots:
        return "so many rounds that an uneven last one costs less than sharing it out"
    if config["SPLIT"] == SHARED_OUT and tiles * steps // config["WK"] < slots:
        return "fewer steps than blocks"
    return None


def at_once(config: Config, on: gpu.Gpu) -> int:
    """Tiles that run at once: one for each block or cluster. Two blocks an SM double the clusters of two, those of four not."""
    split, blocks = config["SPLIT"], config["BLOCKS"]
    return on.sms * blocks if split < 2 else on.clusters[split - 1] * (blocks if split == 2 else 1)


def estimate(call: Call, config: Config, on: gpu.Gpu) -> float:
    """Microseconds of a call by a model fitted to 94 cells on an H100 (8, 4 and 2 bits, 13 layers) and, between these, to the
    model before it: its pick is within 0.8% of the best in their geometric mean, 7% at worst. A step of 128 k takes a smooth
    maximum of what its parts take: tensor cores, issue slots of dequantising, loads of words and x; nothing beats reading the
    weights once."""
    WN, WK, NB, split, most, bits, M = *(config[k] for k in KEYS), call.scheme.bits, call.M
    steps, tiles, slots, size = math.ceil(call.K / 128), _tiles(call, config), on.sms * most, WN * NB / 256
    blocks = tiles * split if split > 1 else min(tiles if split else tiles * steps, slots)
    beside = min(most, math.ceil(blocks / on.sms))  # blocks that do share an SM
    parts = (2.359 * WN * NB, 212.3 * WN, (WN * 1024 * bits + 256 * NB) / 52.89)  # cycles
    step = beside * sum(p**1.51 for p in parts) ** (1 / 1.51) / 1700
    step *= 1.1 if bits == 8 and beside < most else 1  # half of an SM's ring, and stages twice as large: too few in flight
    end = size / beside + 0.296 + (0.356 * WK**0.5 if WK > 1 and split < 2 else 0)  # of a tile
    # blocks at different k do not ask the second-level cache for the same lines (M = 4096, K = 14336: 687 us for 598)
    far = M * call.K > 50e6
    if split == SHARED_OUT:
        whole = max(tiles // slots - 1, 0)
        run = (tiles - whole * slots) * steps / slots  # a block's share
        apart = 1.15 if far else 1.04 if M > NB else 1.08 if (bits, NB) == (8, 256) else 1
        us = (whole * steps + run * apart) * step + end * (1 + whole + run / steps)
        us += 0.963 * size * max(steps / run, 1)
        us += 3.3 if M > NB else 4.24 if most == 1 else 4.67 if WN == 2 else 3.8
    else:
        us = math.ceil(tiles / max(at_once(config, on), 1)) * (math.ceil(steps / split) * step + end)
        if split > 1:
            us = us * (1.15 if far else 1) + 0.18 * size * split + (3.3 if most == 1 else 2.34 if split == 2 else 1.45)
    us += 2.64 if (WN, most) == (4, 1) and NB <= 32 else 1.3
    us *= 1.086 if (WN, NB) == (4, 128) else 1.15 if (WK, NB) == (4, 32) else 1
    eighths = call.N * call.K * (bits + 0.24)  # of a byte; faster from memory where they are read once, after a start
    read = eighths / 24.5e6 + 4.2 if M <= NB else eighths / 18.9e6
    return (us**8 + read**8) ** 0.125


# Two blocks an SM must be so much faster alone: whole steps of an 8B model were slower with some, though each was 2 to 9%
# faster alone (us a step without and with: 4 bits, 16, 32, 64 rows 2352, 2422; 2930, 2968; 3750, 3952; 2 bits, 32 rows 2437,
# 2525).
IN_STEPS = 1.1


def _in_steps(call: Call, config: Config) -> float:
    """By how much a config costs more in a step than alone. 2 bits, 16 rows: 1940 us a step without two blocks, 1912 with."""
    return IN_STEPS if config["BLOCKS"] == 2 and (call.M > 16 or call.scheme.bits >= 4) else 1


def _default_config(call: Call, legal: list[Config]) -> Config:
    """By `estimate`, among what it was fitted to; splits only where one round of clusters takes all tiles: 6144 x 4096 at
    M = 1000 takes 85.2 us in three rounds of pairs, 73.4 with its steps shared out."""
    on = gpu.of(call.capability)
    known = [c for c in legal if c["BLOCKS"] == 1 or c["NB"] >= call.M]
    known = [c for c in known or legal if c["SPLIT"] < 2 or _tiles(call, c) <= at_once(c, on)]
    return min(known or legal, key=lambda c: estimate(call, c, on) * _in_steps(call, c))


def _preferred(call: Call) -> bool:
    """Whether this comes before tile_mma. On an H100, us here and there. M = 16: 28672 x 4096 21.2, 23.2 by 4 bits (8 bits:
    42.0, 41.3), 19.3, 24.4 by 3, 16.3, 21.7 by 2, 15.4, 20.3 by 1; 8192 x 8192 16.1, 13.3 by 4 and 11.4, 15.0 by 1. M = 32:
    6144 x 4096 9.7, 10.0 by 4 bits, 8.0, 10.5 by 2; 4096 x 14336 17.2, 16.0 by 4, 15.1, 16.1 by 2; 2048 x 8192 9.2, 10.1 by
    4; 4096 x 4096 8.6, 6.4. 8192 x 8192 at M = 24 18.6, 18.7 by 4 bits."""
    bits, N, K = call.scheme.bits, call.N, call.K
    if call.M <= 16:
        wide = 8192 if bits == 1 else 16384
        return wide <= N and bits < 8
    if call.M > 32 or N >= 8192:
        return True
    return call.M > 24 and ((N >= 6144 and bits < 4) or (K >= 8192 and (N <= 3584 or bits not in (3, 4))))


@cache
def _prepared(bits: int, T: int, group: int, zeros: bool, config: tuple[int, ...], device: int) -> tuple[Kernel, int]:
    """The kernel of a config and its shared memory, resolved once."""
    named: Config = dict(zip(KEYS, config, strict=True))
    smem = plan(bits, group, zeros, named)[1]
    instance = expression(bits, T, group, zeros, named)
    cluster = max(named["SPLIT"], 1)
    return Kernel("tile_wgmma.cu", instance, device, threads(named), PARAMETERS, smem, cluster, serialize=True), smem


@register(
    "cuda/tile_wgmma",
    layouts=("tile",),
    devices=("cuda",),
    preferred_m=(9, 1 << 62),
    prefer=_preferred,
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
    x = rows_of_x(x, 8)
    scales, zeros, bias = companions(p, bias, x.dtype)
    group, T = group_argument(p), scales.shape[0]
    kernel, smem = _prepared(bits, TYPES[x.dtype], group, zeros is not None, tuple(config[k] for k in KEYS), x.device.index)
    tiles, K = 4 * config["WN"], x.shape[1]
    call_tiles, rows = math.ceil(T / tiles) * math.ceil(M / config["NB"]), rows_of_tile(M, config["NB"])
    steps = _steps(p.K, bits, group, config)
    blocks, whole = schedule(call_tiles, steps, config, gpu.here(x.device.index).sms * config["BLOCKS"])
    partials = flags = None
    if whole < call_tiles:
        partials = torch.empty(blocks * 64 * config["WN"] * config["NB"], dtype=torch.float32, device=x.device)
        flags = counters(blocks * config["WN"] * config["WK"], x.device)
    kernel(
        blocks,
        1,
        smem,
        tensor_map(x.data_ptr(), 2, K, M, K * 2, (64, rows), True),
        *weight_maps(p, scales, zeros, group, CHUNK[bits] * chunks_of_step(bits, group, config), tiles),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        M,
        rows,
        loaded_bytes(bits, group, zeros is not None, config, rows),
        p.N,
        steps,
        whole,
        0 if partials is None else partials.data_ptr(),
        0 if flags is None else flags.data_ptr(),
    )
    return y
