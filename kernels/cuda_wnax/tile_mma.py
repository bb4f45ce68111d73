"""cuda/tile_mma: small M from the tile layout. The kernel, its plan and its limits are described in tile_mma.cu.

A config: WARPS that split K in a block, NT row tiles of 16 a block owns, STAGES chunks in flight a warp, SPLIT blocks of
a cluster that split K further (sm_90). MT, tiles of 8 rows of x, follows from M: up to 4, then more blocks.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels.cuda_wnax.driver import Kernel
from lowq_kernels.cuda_wnax.tile_operands import (
    TYPES,
    companions,
    group_argument,
    rows_of_x,
    shared_memory_limit,
)
from lowq_kernels.registry import Call, Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, chunks

MAX_TILES = 4  # NT * MT above this spills registers

CONFIGS: tuple[Config, ...] = tuple(
    {"WARPS": w, "NT": nt, "STAGES": s, "SPLIT": k}
    for w, nt, s, k in (
        (16, 1, 2, 1),
        (16, 2, 2, 1),
        (8, 1, 4, 1),
        (8, 1, 2, 1),
        (8, 2, 2, 1),
        (8, 2, 4, 1),
        (4, 2, 4, 1),
        (8, 4, 2, 1),
        (4, 4, 2, 1),
        (16, 1, 2, 2),
        (8, 1, 2, 4),
        (8, 2, 2, 2),
        (8, 2, 2, 4),
        (8, 4, 2, 2),
        (8, 4, 2, 4),
    )
)
PARAMETERS = (*(ctypes.c_void_p,) * 6, *(ctypes.c_int32,) * 5)


def x_tiles(M: int, bits: int) -> int:
    """MT: tiles of 8 rows of x a block owns. Blocks of at most 32 rows (16 at 1 bit: registers) share M evenly."""
    blocks = math.ceil(M / (16 if bits == 1 else 32))
    return math.ceil(M / blocks / 8)


# registers an instance needs without spills, by bits: NT * MT = 1, 1 with more than two stages, 2, 2 deep or MT = 2, more
REGISTERS = {
    8: (80, 104, 104, 168, 168),
    4: (64, 80, 80, 128, 168),
    3: (84, 128, 128, 168, 255),
    2: (80, 104, 104, 128, 168),
    1: (104, 128, 128, 255, 255),
}


def resident(bits: int, config: Config, MT: int) -> int:
    """Blocks that share an SM (the device code's RESIDENT), by the registers an instance needs; 0: not even one."""
    tiles, deep = config["NT"] * MT, config["STAGES"] > 2
    column = deep if tiles == 1 else 2 + (deep or MT > 1) if tiles == 2 else 4
    return 65536 // (32 * config["WARPS"] * REGISTERS[bits][column])


def shared_plan(call: Call, config: Config) -> tuple[int, int]:
    """(panel, bytes): chunks of x held at once, and a block's dynamic shared memory. panel = 0: it does not fit.

    All of a block's x where that fits beside the other resident blocks, else two panels in turn; later the same bytes
    hold the warps' partial sums.
    """
    bits, MT = call.scheme.bits, x_tiles(call.M, call.scheme.bits)
    rows, chunk_bytes = min(call.M, 8 * MT), 2 * CHUNK[bits]
    part, step = math.ceil(chunks(call.K, bits) / config["SPLIT"]), config["WARPS"] * config["STAGES"]
    budget = (shared_memory_limit(call.capability) - 1024) // resident(bits, config, MT) - 1536
    sums = config["WARPS"] * config["NT"] * MT * 512
    panel, copies = part, 1
    if rows * (panel * chunk_bytes + 16) > budget:
        panel, copies = (budget // (2 * rows) - 16) // chunk_bytes // step * step, 2
    need = max(copies * rows * (panel * chunk_bytes + 16), sums)
    return (panel, need) if panel > 0 and need <= budget else (0, need)


def expression(bits: int, T: int, group: int, zeros: bool, config: Config, MT: int) -> str:
    """The template instance of tile_mma.cu."""
    c = config
    tail = f"{c['WARPS']}, {c['NT']}, {c['STAGES']}, {MT}, {c['SPLIT']}, {resident(bits, config, MT)}"
    return f"tile_mma<{bits}, {T}, {group}, {'true' if zeros else 'false'}, {tail}>"


def _config_refuse(call: Call, config: Config) -> str | None:
    MT = x_tiles(call.M, call.scheme.bits)
    if config["SPLIT"] > 1 and call.capability < (9, 0):
        return "clusters need compute capability 9.0"
    if config["NT"] * MT > MAX_TILES or not resident(call.scheme.bits, config, MT):
        return "too many registers"
    if config["WARPS"] * config["SPLIT"] > max(8, chunks(call.K, call.scheme.bits)):
        return "more warps than chunks of K"
    if not shared_plan(call, config)[0]:
        return "too much shared memory"
    return None


def _default_config(call: Call, legal: list[Config]) -> Config:
    return legal[0]


@cache
def _prepared(
    call: Call, T: int, group: int, zeros: bool, config: tuple[int, ...], device: int
) -> tuple[Kernel, tuple[int, int]]:
    """The kernel of a call and its shared memory plan, resolved once."""
    named: Config = dict(zip(("WARPS", "NT", "STAGES", "SPLIT"), config, strict=True))
    instance = expression(call.scheme.bits, T, group, zeros, named, x_tiles(call.M, call.scheme.bits))
    return _kernel(instance, device, named["WARPS"], named["SPLIT"]), shared_plan(call, named)


@cache
def _kernel(instance: str, device: int, warps: int, split: int) -> Kernel:
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    limit = shared_memory_limit(torch.cuda.get_device_capability(device)) - 1024
    return Kernel("tile_mma.cu", instance, device, 32 * warps, PARAMETERS, smem=limit, cluster=split, serialize=hopper)


@register(
    "cuda/tile_mma",
    layouts=("tile",),
    devices=("cuda",),
    min_capability=(8, 0),
    preferred_m=(1, 64),
    rank=20,
    configs=CONFIGS,
    config_refuse=_config_refuse,
    default_config=_default_config,
)
def tile_mma(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): fp32 sums, rounded once."""
    M = x.shape[0]
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    x = rows_of_x(x, CHUNK[p.scheme.bits])
    scales, zeros, bias = companions(p, bias, x.dtype)
    c = (config["WARPS"], config["NT"], config["STAGES"], config["SPLIT"])
    group, T = group_argument(p), TYPES[x.dtype]
    kernel, (panel, smem) = _prepared(Call.of(x, p), T, group, zeros is not None, c, x.device.index)
    kernel(
        p.words.shape[0] // c[1] * c[3],
        math.ceil(M / (8 * x_tiles(M, p.scheme.bits))),
        smem,
        p.words.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        M,
        p.N,
        x.shape[1],
        scales.shape[1],
        panel,
    )
    return y
