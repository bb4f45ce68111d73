"""cuda/tile_int8x2: up to 16 rows of x from the tile layout on Hopper, codes as bytes by x as two int8 planes, in integers.

Two launches: int8_planes.cu splits x, tile_int8x2.cu multiplies; both are described there.
A config: WARPGROUPS_N x WARPGROUPS_K consumer warpgroups of 64 rows of W each, those of N side by side (a tile is
64 * WARPGROUPS_N rows), those of K sharing each step; SPANS of 128 k of a step that a warpgroup takes; BLOCKS_PER_SM.
"""

import ctypes
import math
from functools import cache
from typing import Any

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import (
    SMEM_KEEPING_L1,
    TYPES,
    group_argument,
    groups_of_step,
    rows_of_x,
    scales_zeros_bias,
    share_of_block,
    weight_maps,
)
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config, configs_of, register
from lowq_kernels.products.cuda.int8_planes import SPAN, int8_planes, rows_of_units
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, WORDS

KEYS = ("WARPGROUPS_N", "WARPGROUPS_K", "SPANS", "BLOCKS_PER_SM")
CONFIGS = configs_of(KEYS, (
    (2, 1, 2, 2), (2, 1, 4, 2), (7, 1, 2, 1), (7, 1, 4, 1), (1, 2, 2, 2), (1, 2, 4, 2), (2, 2, 2, 1), (1, 4, 2, 1),
))  # fmt: skip
PARAMETERS = (TensorMap,) * 5 + (ctypes.c_void_p,) * 6 + (ctypes.c_int32,) * 7
MAX_STAGES = 8


def columns(M: int) -> int:
    """COLUMNS of a product: two per row of x."""
    return -(-2 * M // 8) * 8


def buffers(config: Config) -> int:
    """BUFFERS: products that a warpgroup has in flight at once, as registers allow."""
    return 1 if config["WARPGROUPS_N"] == 7 or config["SPANS"] == 4 else 2


def stage_bytes(M: int, bits: int, group: int, zeros: bool, config: Config) -> int:
    """Shared memory of a stage: planes, words, scales, zeros and units of one step."""
    spans, tiles = config["SPANS"] * config["WARPGROUPS_K"], 4 * config["WARPGROUPS_N"]
    words, metas = spans * SPAN // CHUNK[bits] * tiles * WORDS[bits] * 4, tiles * groups_of_step(group, spans * SPAN) * 32
    return -(-(spans * (columns(M) * SPAN + rows_of_units(M) * 8) + words + (2 if zeros else 1) * metas) // 1024) * 1024


def plan(M: int, bits: int, group: int, zeros: bool, config: Config) -> tuple[int, int]:
    """(stages, dynamic shared memory): as many stages as fit next to the staging of sums."""
    stage = stage_bytes(M, bits, group, zeros, config)
    staging = config["WARPGROUPS_N"] * config["WARPGROUPS_K"] * columns(M) // 2 * 72 * 4
    stages = min(MAX_STAGES, (allowed(config) - staging) // stage)
    return stages, stages * stage + staging


def allowed(config: Config) -> int:
    """Dynamic shared memory that a block may ask for."""
    of_sm = SMEM_KEEPING_L1[2 if config["BLOCKS_PER_SM"] == 2 and config["WARPGROUPS_K"] == 1 else 1]
    return share_of_block(of_sm, config["BLOCKS_PER_SM"])


def expression(M: int, bits: int, T: int, group: int, zeros: bool, config: Config) -> str:
    """The template instance of tile_int8x2.cu."""
    tile = f"{config['WARPGROUPS_N']}, {config['WARPGROUPS_K']}, {columns(M)}, {config['SPANS']}, {buffers(config)}"
    stages = plan(M, bits, group, zeros, config)[0]
    return f"tile_int8x2<{bits}, {T}, {group}, {str(zeros).lower()}, {tile}, {stages}, {config['BLOCKS_PER_SM']}>"


def _refuse(call: Call) -> str | None:
    if why := gpu.no_wgmma(call.capability):
        return why
    group = call.scheme.group_size
    return f"groups of {group}: takes multiples of {SPAN}, or one a row" if group != call.K and group % SPAN else None


def _config_refuse(call: Call, config: Config) -> str | None:
    bits, s = call.scheme.bits, call.scheme
    group = 0 if s.group_size == call.K else s.group_size
    return "too much shared memory" if plan(call.M, bits, group, s.zero != "none", config)[0] < 2 else None


def cost(call: Call, config: Config, on: gpu.Gpu, model: dict[str, Any]) -> float:
    """The work of the busiest SM: 64-row tiles of W times spans of k, weighted by measurements of 12 layers in 2 and 1 bits."""
    WN, WK, E, blocks = (config[k] for k in KEYS)
    tiles, bits = math.ceil(call.N / (64 * WN)), call.scheme.bits
    waves, rest = divmod(tiles, on.sms * blocks)
    last = 0.0 if rest == 0 else model["half_full_sm"] if blocks == 2 and rest <= on.sms else blocks
    spans = math.ceil(call.K / (SPAN * E * WK)) * E * WK
    # of four spans: fewer barriers, but fewer stages, too few of 2 bits
    four = model["four_spans"]["1 bit" if bits == 1 else "long rows" if WN == 1 and model["long_rows"] <= call.K else "else"]
    return (waves * blocks + last) * WN * spans * model["tile_cost"][f"{WN}x{WK}"] * (1.0 if E == 2 else four)


def _default_config(call: Call, legal: list[Config]) -> Config:
    on = gpu.of(call.capability)
    model = policy.model("cuda/tile_int8x2", on)
    return min(legal, key=lambda c: cost(call, c, on, model))


@cache
def _prepared(M: int, bits: int, T: int, group: int, zeros: bool, config: tuple[int, ...], device: int) -> tuple[Kernel, int]:
    """The kernel of a config and its shared memory, resolved once."""
    named: Config = dict(zip(KEYS, config, strict=True))
    smem = plan(M, bits, group, zeros, named)[1]
    threads, instance = 128 * (1 + named["WARPGROUPS_N"] * named["WARPGROUPS_K"]), expression(M, bits, T, group, zeros, named)
    return Kernel("tile_int8x2.cu", instance, device, threads, PARAMETERS, smem, serialize=True), smem


@register(
    "cuda/tile_int8x2",
    layouts=("tile",),
    bits=(4, 3, 2, 1),
    m_range=(1, 16),
    prefer=policy.prefers("cuda/tile_int8x2"),
    rank=17,
    configs=CONFIGS,
    refuse=_refuse,
    config_refuse=_config_refuse,
    default_config=_default_config,
)
def tile_int8x2(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): x rounded to 2^-13 of the largest in 128 k, whole sums of it, scaled in fp32."""
    M, bits = x.shape[0], p.scheme.bits
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    x = rows_of_x(x)
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    group, T, G = group_argument(p), scales.shape[0], scales.shape[1]
    operands = (bits, TYPES[x.dtype], group, zeros is not None, tuple(config[k] for k in KEYS), x.device.index)
    kernel, smem = _prepared(columns(M) // 2, *operands)
    planes, units = int8_planes(x, bits)
    tiles, spans = 4 * config["WARPGROUPS_N"], config["SPANS"] * config["WARPGROUPS_K"]
    stride = 2 * units.shape[1]
    maps = (
        tensor_map(planes.data_ptr(), 1, planes.shape[1], 2 * M, planes.shape[1], (SPAN, 2 * M), True),
        tensor_map(units.data_ptr(), 4, stride, units.shape[0], stride * 4, (stride, spans), False),
        *weight_maps(p, scales, zeros, group, spans * SPAN, tiles),
    )
    sizes = (M, p.N, x.shape[1], math.ceil(p.K / (spans * SPAN)), T, p.words.shape[1] // WORDS[bits], G)
    blocks = min(math.ceil(T / tiles), gpu.here(x.device.index).sms * config["BLOCKS_PER_SM"])
    of_W = (p.words.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    pointers = (x.data_ptr(), *of_W, 0 if bias is None else bias.data_ptr(), y.data_ptr())
    kernel(blocks, 1, smem, *maps, *pointers, *sizes)
    return y
