"""cuda/tile_int8, cuda/tile_fp8: x rounded to int8 or e4m3 per token, times codes of the tile layout, on 8-bit tensor cores.

Two launches: act_rows.cu rounds x and orders it as codes lie in words, tile_wgmma8.cu multiplies; both are described there.
A config: ROW_TILES_64 of 64 rows of W that each of two warpgroups owns (a tile is 128 * ROW_TILES_64 rows); BLOCK_M, rows of x
of a tile; SPLIT_K, blocks of a cluster that split K of one tile, for layers with fewer tiles than the GPU has SMs.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import TYPES, aligned, group_argument, scales_zeros_bias, share_of_block, weight_maps
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config, configs_of, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, WORDS

KEYS = ("ROW_TILES_64", "BLOCK_M", "SPLIT_K")
CONFIGS = configs_of(KEYS, (
    (2, 128, 1), (2, 128, 2), (1, 128, 1), (1, 128, 2), (2, 64, 1), (2, 64, 2), (1, 64, 1), (1, 64, 2), (1, 64, 4),
))  # fmt: skip
PARAMETERS = (TensorMap,) * 5 + (ctypes.c_void_p,) * 5 + (ctypes.c_int32,) * 5
ROUND_PARAMETERS = (ctypes.c_void_p,) * 4 + (ctypes.c_int32,) * 3
BLOCK_K = 128  # k per stage
BAND = 8192  # rows of W whose tiles run at the same time
MAX_STAGES = 8
MOST_HELD = 7  # act_rows holds up to this many times 4,096 values of a row of x, 8 registers per thread each
SHARED = share_of_block(gpu.HOPPER.smem_sm, 1)
GATES = {"": 0, "silu": 1, "gelu_tanh": 2}  # what act_rows computes before it rounds


def sum_span(group: int) -> int:
    """SG: k that the tensor core sums before the sum is scaled; group 0: a row is one group."""
    return 64 if group == 64 else 128


def plan(bits: int, group: int, config: Config) -> tuple[int, int]:
    """(stages, dynamic shared memory); under a split, the fp32 sums and the staging of outputs reuse the ring's memory."""
    tiles, split = 8 * config["ROW_TILES_64"], config["SPLIT_K"]
    words = BLOCK_K // CHUNK[bits] * tiles * WORDS[bits] * 4
    stage = -(-(config["BLOCK_M"] * BLOCK_K + words + tiles * BLOCK_K // sum_span(group) * 32) // 1024) * 1024
    zeros, staging, sums = tiles * 1024, 4 * 128 * rows_of_piece(config), config["ROW_TILES_64"] * config["BLOCK_M"] * 512
    stages = min(MAX_STAGES, (SHARED - zeros - (staging if split == 1 else 0)) // stage)
    return stages, stages * stage + zeros + staging if split == 1 else max(stages * stage + zeros, sums)


def rows_of_piece(config: Config) -> int:
    """Rows of y that a block stores at a time."""
    return min(64, config["BLOCK_M"] // config["SPLIT_K"])


def expression(bits: int, T: int, int8: bool, group: int, zeros: bool, config: Config) -> str:
    """The template instance of tile_wgmma8.cu."""
    flags = ("false", "true")
    stages = plan(bits, group, config)[0]
    tile = f"{config['ROW_TILES_64']}, {config['BLOCK_M']}, {sum_span(group) // 32}, {stages}, {config['SPLIT_K']}"
    return f"tile_wgmma8<{bits}, {T}, {flags[int8]}, {group}, {flags[zeros]}, {tile}, {BAND // (128 * config['ROW_TILES_64'])}>"


def _refuse(call: Call) -> str | None:
    if why := gpu.no_wgmma(call.capability):
        return why
    bits, group = call.scheme.bits, call.scheme.group_size
    if call.act == "fp8" and bits == 8:
        return "e4m3 cannot represent all codes of 8 bits"
    if group != call.K and group % 128 and not (group == 64 and CHUNK[bits] == 64):
        return f"groups of {group}: takes multiples of 128{' and 64' if CHUNK[bits] == 64 else ''}"
    return None


def _config_refuse(call: Call, config: Config) -> str | None:
    if config["SPLIT_K"] > math.ceil(call.K / BLOCK_K):
        return "nothing to split"
    return None


def _default_config(call: Call, legal: list[Config]) -> Config:
    """The config with the fewest waves, weighted by the time of a tile (fitted in 4 bits with groups of 128)."""
    on = gpu.of(call.capability)
    model = policy.model(f"cuda/tile_{call.act}", on)

    def cost(c: Config) -> float:
        rows, nb, split = (c[k] for k in KEYS)
        tiles = math.ceil(call.N / (128 * rows)) * math.ceil(call.M / nb)
        step = model["step_us"][f"{rows}x{nb}"]
        if call.scheme.bits <= 3 and rows * nb == 256:
            step *= model["few_bits_in_256_rows"]  # int8, 2 bits, 8192 x 8192, M = 1024: 196 us; half tiles: 169
        tile = math.ceil(math.ceil(call.K / BLOCK_K) / split) * step + model["tile_us"]
        sums = model["split_us"] + rows * nb * model["split_us_a_row"] if split > 1 else 0
        return math.ceil(tiles / max(on.clusters[split - 1], 1)) * tile + sums

    return min(legal, key=cost)


def rounds_held(K: int) -> int:
    """The rounds of 4,096 values in which act_rows holds a row of K in registers; 0: it reads longer rows twice."""
    rounds = math.ceil(math.ceil(K / BLOCK_K) * BLOCK_K / 4096)
    return rounds if rounds <= MOST_HELD else 0


@cache
def _prepared(
    bits: int, T: int, int8: bool, group: int, zeros: bool, config: tuple[int, ...], steps: int, device: int, gate: str
) -> tuple[Kernel, Kernel, int]:
    """Both kernels of a config and the second one's shared memory, resolved once."""
    named: Config = dict(zip(KEYS, config, strict=True))
    smem = plan(bits, group, named)[1]
    held = rounds_held(steps * BLOCK_K)
    flags = f"{str(int8).lower()}, {CHUNK[bits]}, {str(bits == 8).lower()}"
    rounding = f"act_rows<{T}, {flags}, {sum_span(group)}, {held}, {GATES[gate]}>"
    rows = Kernel("act_rows.cu", rounding, device, 256, ROUND_PARAMETERS, serialize=True)
    instance = expression(bits, T, int8, group, zeros, named)
    return rows, Kernel("tile_wgmma8.cu", instance, device, 384, PARAMETERS, smem, named["SPLIT_K"], serialize=True), smem


def product(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config, int8: bool, gate: str = ""
) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): x rounded per token, 8-bit products summed exactly or in fp32, scaled in fp32.

    gate: one of GATES; x is then gate and up (M, 2 K), and act(gate) * up of them is what is rounded.
    """
    M, K, bits, device = x.shape[0], p.K, p.scheme.bits, x.device
    y = torch.empty(M, p.N, dtype=x.dtype, device=device)
    if M == 0:
        return y
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    group, T, G = group_argument(p), scales.shape[0], scales.shape[1]
    steps, span = math.ceil(K / BLOCK_K), sum_span(group)
    rows, kernel, smem = _prepared(
        bits, TYPES[x.dtype], int8, group, zeros is not None, tuple(config[n] for n in KEYS), steps, device.index, gate
    )
    x = aligned(x)
    x8 = torch.empty(M, steps * BLOCK_K, dtype=torch.uint8, device=device)
    columns = steps * BLOCK_K // span
    sums = torch.empty(M, -(-columns // 8) * 8, dtype=x.dtype, device=device)
    x_scales = torch.empty(M, dtype=torch.float32, device=device)
    rows(M, 1, 0, x.data_ptr(), x8.data_ptr(), sums.data_ptr(), x_scales.data_ptr(), K, steps, sums.shape[1])
    tiles, nb = 8 * config["ROW_TILES_64"], config["BLOCK_M"]
    all_tiles = math.ceil(T / tiles) * math.ceil(M / nb)
    split = config["SPLIT_K"]
    blocks = all_tiles * split if split > 1 else min(all_tiles, gpu.here(device.index).sms)
    maps = (
        tensor_map(x8.data_ptr(), 1, x8.shape[1], M, x8.shape[1], (BLOCK_K, nb), True),
        tensor_map(sums.data_ptr(), 2, columns, M, sums.shape[1] * 2, (64, nb), True),
        *weight_maps(p, scales, None, group, BLOCK_K, tiles)[:2],
    )
    y_map = tensor_map(y.data_ptr(), 2, p.N, M, p.N * 2, (64, rows_of_piece(config)), True) if p.N % 8 == 0 else maps[0]
    of_W = (scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    pointers = (*of_W, x_scales.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    kernel(blocks, 1, smem, *maps, y_map, *pointers, M, p.N, steps, T, G)
    return y


FACTS: dict[str, object] = {"layouts": ("tile",), "rank": 18, "configs": CONFIGS, "refuse": _refuse}
FACTS |= {"config_refuse": _config_refuse, "default_config": _default_config}


@register("cuda/tile_int8", bits=(8, 4, 3, 2), acts=("int8",), prefer=policy.prefers("cuda/tile_int8"), **FACTS)
def tile_int8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): x rounded to int8 per token, whole sums of every group, scaled and added in fp32."""
    return product(x, p, bias, config, True)


@register("cuda/tile_fp8", bits=(4, 3, 2), acts=("fp8",), prefer=policy.prefers("cuda/tile_fp8"), **FACTS)
def tile_fp8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): x rounded to e4m3 per token, sums of 128 k by the tensor core, scaled and added in fp32."""
    return product(x, p, bias, config, False)
