"""cuda/tile_mma: small M from the tile layout. The kernel, its plan and its limits are described in tile_mma.cu.

A config: WARPS of a block, NT row tiles of 16 a warp works on at once, STAGES chunks in flight a warp, SPLIT blocks of a
cluster that split K (sm_90), BLOCKS of one launch an SM is meant to hold. MT, tiles of 8 rows of x, follows from M.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch

from lowq_kernels.cuda_wnax.driver import Kernel
from lowq_kernels.cuda_wnax.tile_operands import (
    TYPES,
    companions,
    multiprocessors,
    rows_of_x,
    shared_memory_limit,
)
from lowq_kernels.registry import Call, Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, WORDS, chunks, padded_rows
from lowq_packers.scheme import Scheme, ZeroKind

CONFIGS: tuple[Config, ...] = tuple(
    {"WARPS": w, "NT": nt, "STAGES": s, "SPLIT": k, "BLOCKS": b}
    for w, nt, s, k, b in (
        (8, 2, 3, 1, 1),
        (8, 2, 4, 1, 1),
        (8, 2, 2, 1, 2),
        (8, 2, 3, 1, 2),
        (16, 1, 2, 1, 1),
        (16, 1, 3, 1, 1),
        (16, 1, 2, 1, 2),
        (16, 2, 2, 1, 1),
        (16, 2, 3, 1, 1),
        (8, 4, 2, 1, 1),
        (8, 4, 3, 1, 1),
        (8, 1, 3, 1, 2),
        (8, 2, 2, 1, 1),
        (8, 1, 3, 1, 1),
        (8, 1, 2, 1, 1),
        (4, 2, 2, 1, 1),
        (4, 1, 2, 1, 1),
        (8, 2, 3, 2, 1),
        (8, 2, 2, 2, 2),
        (8, 2, 3, 4, 1),
        (8, 2, 3, 8, 1),
    )
)
STEP = 128  # k of a step of the device code, or a chunk where that is longer
PARAMETERS = (*(ctypes.c_void_p,) * 6, *(ctypes.c_int32,) * 7)
# registers an instance needs without spills, by bits: NT * MT = 1, 2, more
REGISTERS = {8: (64, 128, 168), 4: (64, 128, 168), 3: (84, 168, 255), 2: (64, 128, 168), 1: (104, 168, 255)}


def resident(bits: int, config: Config, MT: int) -> int:
    """Blocks that share an SM (the device code's RESIDENT), by the registers an instance needs; 0: not even one."""
    column = 2 if MT > 1 and bits != 2 else min(config["NT"] * MT, 3) - 1
    return 65536 // (32 * config["WARPS"] * REGISTERS[bits][column])


def slot_bytes(scheme: Scheme, K: int) -> int:
    """Shared memory of a tile's step in flight: its words, and 32 bytes of scales (and zeros) for each group it meets."""
    step, group = max(STEP, CHUNK[scheme.bits]), scheme.group_size
    metas = 1 if group % step == 0 or group == K else step // math.gcd(group, step)
    return step // CHUNK[scheme.bits] * WORDS[scheme.bits] * 4 + metas * (1 if scheme.zero == "none" else 2) * 32


@dataclass(frozen=True)
class Plan:
    """How a call is cut: MT tiles of 8 rows, `rows` of x a block, blocks along x and y, dynamic shared memory in bytes."""

    MT: int
    rows: int
    grid: tuple[int, int]
    smem: int


def plan(call: Call, config: Config) -> Plan | None:
    """Blocks of at most 32 rows (16 at 1 bit: registers) share M evenly; more blocks where the rings would not fit."""
    bits, split = call.scheme.bits, config["SPLIT"]
    units = padded_rows(call.N) // (16 * config["NT"])
    teams = min(units, max(1, multiprocessors() * config["BLOCKS"] // split))
    budget = (shared_memory_limit(call.capability) - 1024) // config["BLOCKS"] - 1536
    for blocks in range(math.ceil(call.M / (16 if bits == 1 else 32)), call.M + 1):
        rows = math.ceil(call.M / blocks)
        MT = math.ceil(rows / 8)
        slot = config["NT"] * slot_bytes(call.scheme, call.K) + rows * (2 * max(STEP, CHUNK[bits]) + 16)
        unit_bytes = config["NT"] * MT * 512
        smem = config["WARPS"] * (config["STAGES"] * slot + 2 * unit_bytes)
        if split > 1:
            smem += math.ceil(units / teams) * unit_bytes
        if smem <= budget:
            return Plan(MT, rows, (teams * split, math.ceil(call.M / rows)), smem)
        if rows == 1:
            return None
    return None


def expression(bits: int, T: int, group: int, zeros: bool, config: Config, MT: int) -> str:
    """The template instance of tile_mma.cu."""
    c = config
    tail = f"{c['WARPS']}, {c['NT']}, {c['STAGES']}, {MT}, {c['SPLIT']}, {resident(bits, config, MT)}"
    return f"tile_mma<{bits}, {T}, {group}, {'true' if zeros else 'false'}, {tail}>"


def _config_refuse(call: Call, config: Config) -> str | None:
    if config["SPLIT"] > 1 and call.capability < (9, 0):
        return "clusters need compute capability 9.0"
    cut = plan(call, config)
    if cut is None:
        return "too much shared memory"
    if config["NT"] * cut.MT > 4 or resident(call.scheme.bits, config, cut.MT) < config["BLOCKS"]:
        return "too many registers"
    if config["SPLIT"] > chunks(call.K, call.scheme.bits):
        return "more blocks than chunks of K"
    return None


# (WARPS, NT, STAGES, BLOCKS) in order of preference, by rows of x and size of the layer; the first legal one is taken.
# From benchmarks/results/h100/tune_llama3_8b.json (4 bits): within 3% of the best config in all its cells of M <= 16.
PREFERRED = {
    ("few", "small"): ((8, 2, 3, 2), (8, 2, 3, 1), (16, 2, 2, 1), (8, 2, 2, 1), (8, 1, 2, 1), (4, 2, 2, 1)),
    ("few", "large"): ((16, 2, 3, 1), (16, 2, 2, 1), (8, 2, 3, 1), (8, 2, 2, 1), (8, 1, 2, 1), (4, 2, 2, 1)),
    ("more", "small"): ((8, 2, 3, 1), (8, 2, 2, 1), (8, 1, 3, 1), (8, 1, 2, 1), (4, 2, 2, 1)),
    ("more", "large"): ((8, 2, 3, 1), (8, 2, 2, 1), (8, 1, 3, 1), (8, 1, 2, 1), (4, 2, 2, 1)),
}
LARGE = 24 << 20  # weights; 4096 x 4096 is small, 4096 x 14336 large


def _default_config(call: Call, legal: list[Config]) -> Config:
    """The first of PREFERRED that is legal; else the legal config with the fewest blocks of x, hence passes over W."""
    cuts = {tuple(c.values()): plan(call, c) for c in legal}
    fewest = min(cut.grid[1] for cut in cuts.values() if cut)
    kind = ("few" if call.M <= 8 else "more", "large" if call.N * call.K > LARGE else "small")
    if kind == ("few", "large") and call.scheme.bits <= 2:  # instructions, not memory: more rows a fragment of x
        order: tuple[tuple[int, int, int, int], ...] = ((8, 4, 3, 1), (8, 4, 2, 1), *PREFERRED[kind])
    else:
        order = PREFERRED[kind]
    for warps, nt, stages, blocks in order:
        if blocks == 2 and padded_rows(call.N) // (16 * nt) <= multiprocessors():
            continue  # one block an SM has them all
        wanted: Config = {"WARPS": warps, "NT": nt, "STAGES": stages, "SPLIT": 1, "BLOCKS": blocks}
        cut = cuts.get(tuple(wanted.values()))
        if cut is not None and cut.grid[1] == fewest:
            return wanted
    return next(c for c in legal if (cut := cuts[tuple(c.values())]) and cut.grid[1] == fewest)


@cache
def _prepared(
    M: int, N: int, K: int, bits: int, group: int, zero: ZeroKind, dtype: torch.dtype, device: int, *config: int
) -> tuple[Kernel, Plan]:
    """The kernel of a call and its plan, resolved once. Plain numbers for a key: hashing a Call costs as much as a launch."""
    named: Config = dict(zip(CONFIGS[0], config, strict=True))
    scheme = Scheme(bits, group, zero)
    cut = plan(Call(M, N, K, scheme, "tile", dtype, "cuda", torch.cuda.get_device_capability(device)), named)
    assert cut is not None  # config_refuse has asked
    one_group = 0 if scheme.groups(K) == 1 else group
    instance = expression(bits, TYPES[dtype], one_group, zero != "none", named, cut.MT)
    return _kernel(instance, device, named["WARPS"], named["SPLIT"]), cut


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
    preferred_m=(1, 128),
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
    x = rows_of_x(x, 8)
    scales, zeros, bias = companions(p, bias, x.dtype)
    s = p.scheme
    facts = (M, p.N, p.K, s.bits, s.group_size, s.zero, x.dtype, x.device.index)
    kernel, cut = _prepared(*facts, *config.values())
    kernel(
        *cut.grid,
        cut.smem,
        p.words.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        M,
        p.N,
        x.shape[1],
        chunks(p.K, s.bits),
        scales.shape[1],
        p.words.shape[0] // config["NT"],
        cut.rows,
    )
    return y
