"""cuda/tile_wgmma: large M from the tile layout on Hopper. The kernel and its plan are described in tile_wgmma.cu.

A config: MH, halves of 64 rows of W a warpgroup owns (a tile is 128 * MH rows); NB, rows of x of a tile; SPLIT, blocks of
a cluster that split K of one tile, for layers with fewer tiles than the GPU has SMs.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels.cuda_wnax.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda_wnax.tile_operands import TYPES, companions, group_argument, multiprocessors, rows_of_x
from lowq_kernels.registry import Call, Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, WORDS, chunks, padded_rows

CONFIGS: tuple[Config, ...] = tuple(
    {"MH": mh, "NB": nb, "SPLIT": k}
    for mh, nb, splits in (
        (2, 128, (1, 2, 4, 8)),
        (2, 64, (1, 2, 4, 8)),
        (2, 32, (1, 2, 4)),
        (1, 256, (1, 2)),
        (1, 128, (1, 2, 4)),
        (1, 64, (1, 2, 4)),
        (1, 32, (1, 2, 4)),
    )
    for k in splits
)
PARAMETERS = (TensorMap,) * 4 + (ctypes.c_void_p,) * 2 + (ctypes.c_int32,) * 3
BAND = 4096  # rows of W whose tiles run side by side: with 4 x tiles of 256 rows they fill 132 SMs, and x and W cost L2 alike
MAX_STAGES = 8
SHARED = 226 << 10  # what a block may ask for besides its 1 KB of barriers and masks


def groups_of_chunk(group: int, bits: int) -> int:
    """Groups that a chunk may meet (the device code's GROUPS); group 0: a row is one group."""
    step = CHUNK[bits]
    if group == 0 or group % step == 0:
        return 1
    return step // group if step % group == 0 else (step - 1) // group + 2


def stage_bytes(bits: int, group: int, zeros: bool, config: Config) -> int:
    """Shared memory of a stage: x, words, scales and zeros of one chunk."""
    tiles = 8 * config["MH"]
    metas = (2 if zeros else 1) * tiles * groups_of_chunk(group, bits) * 32
    return config["NB"] * CHUNK[bits] * 2 + tiles * WORDS[bits] * 4 + metas


def plan(bits: int, group: int, zeros: bool, config: Config) -> tuple[int, int]:
    """(stages, dynamic shared memory): as many stages as fit beside the staging of the outputs; under a split that one and
    the fp32 sums take the ring's place."""
    stage = stage_bytes(bits, group, zeros, config)
    split = config["SPLIT"] > 1
    staging = 2 * 32 * (64 * config["MH"] + 8) * 2
    stages = min(MAX_STAGES, (SHARED - (0 if split else staging)) // stage)
    sums = config["MH"] * config["NB"] * 512 if split else 0
    return stages, max(stages * stage + (0 if split else staging), sums, staging)


def expression(bits: int, T: int, group: int, zeros: bool, config: Config) -> str:
    """The template instance of tile_wgmma.cu."""
    stages = plan(bits, group, zeros, config)[0]
    tail = f"{config['MH']}, {config['NB']}, {stages}, {config['SPLIT']}, {BAND // (128 * config['MH'])}"
    return f"tile_wgmma<{bits}, {T}, {group}, {'true' if zeros else 'false'}, {tail}>"


def _tiles(call: Call, config: Config) -> int:
    return math.ceil(padded_rows(call.N) / (128 * config["MH"])) * math.ceil(call.M / config["NB"])


def _refuse(call: Call) -> str | None:
    # wgmma is not in later architectures: 10.0 and 12.0 have other instructions
    return None if call.capability == (9, 0) else f"needs compute capability (9, 0), this GPU has {call.capability}"


def _config_refuse(call: Call, config: Config) -> str | None:
    bits, s = call.scheme.bits, call.scheme
    stages, smem = plan(bits, 0 if s.group_size == call.K else s.group_size, s.zero != "none", config)
    if stages < 2 or smem > SHARED:
        return "too much shared memory"
    if config["SPLIT"] > min(config["NB"] // 8, chunks(call.K, bits)):
        return "nothing to split"
    return None


def estimate(call: Call, config: Config, sms: int) -> float:
    """Microseconds of a call by a model fitted to an H100 (it picks the measured best in all cells of
    benchmarks/results/h100/cuda_tile.json at 4 bits that it was fitted to): rounds of tiles, each as long as the slower of
    tensor cores and dequantisation, plus what a tile and a split cost besides."""
    MH, NB, split = config["MH"], config["NB"], config["SPLIT"]
    # clusters live within a group of at most 18 SMs: of 132 SMs, clusters of four find room on some 112
    capacity = sms // split * split if split <= 2 else sms // 18 * (18 // split * split)
    rounds = math.ceil(_tiles(call, config) * split / max(capacity, split))
    cycles = max(3.9 * MH * NB, 300 + 355 * MH)  # of 64 k: wgmma, or reading and dequantising
    tile = math.ceil(call.K / 64 / split) * cycles / 1700 + 1.3 + 2.8 * MH * NB / 256
    return rounds * tile + (1.9 + 3 * MH * NB / 128 if split > 1 else 0)


def _default_config(call: Call, legal: list[Config]) -> Config:
    return min(legal, key=lambda c: estimate(call, c, multiprocessors()))


@cache
def _prepared(bits: int, T: int, group: int, zeros: bool, config: tuple[int, ...], device: int) -> tuple[Kernel, int]:
    """The kernel of a config and its shared memory, resolved once."""
    named: Config = dict(zip(CONFIGS[0], config, strict=True))
    smem = plan(bits, group, zeros, named)[1]
    instance = expression(bits, T, group, zeros, named)
    return Kernel("tile_wgmma.cu", instance, device, 384, PARAMETERS, smem, named["SPLIT"], serialize=True), smem


@register(
    "cuda/tile_wgmma",
    layouts=("tile",),
    devices=("cuda",),
    min_capability=(9, 0),
    preferred_m=(17, 1 << 62),
    rank=18,  # before tile_mma from M = 17
    configs=CONFIGS,
    refuse=_refuse,
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
    group, T, G = group_argument(p), scales.shape[0], scales.shape[1]
    kernel, smem = _prepared(bits, TYPES[x.dtype], group, zeros is not None, tuple(config.values()), x.device.index)
    tiles, K = 8 * config["MH"], x.shape[1]
    meta_box = (groups_of_chunk(group, bits) * 16, tiles)
    scales_map = tensor_map(scales.data_ptr(), 2, G * 16, T, G * 32, meta_box, False)
    call_tiles = math.ceil(T / tiles) * math.ceil(M / config["NB"])
    blocks = call_tiles * config["SPLIT"] if config["SPLIT"] > 1 else min(call_tiles, multiprocessors(x.device.index))
    kernel(
        blocks,
        1,
        smem,
        tensor_map(x.data_ptr(), 2, K, M, K * 2, (64, config["NB"]), True),
        tensor_map(p.words.data_ptr(), 4, p.words.shape[1], T, p.words.shape[1] * 4, (WORDS[bits], tiles), False),
        scales_map,
        scales_map if zeros is None else tensor_map(zeros.data_ptr(), 2, G * 16, T, G * 32, meta_box, False),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        M,
        p.N,
        chunks(p.K, bits),
    )
    return y
