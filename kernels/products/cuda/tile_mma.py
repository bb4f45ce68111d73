"""cuda/tile_mma: small M, from GEMV on, from the tile layout. The kernel, its plan and its limits are described in tile_mma.cu.

A config: WARPS of a block share K; ROW_TILES of 16 rows of W a block; BLOCK_K, k that a warp takes at once; STEPS_IN_FLIGHT of
these; BLOCKS_PER_SM, which caps the registers; INT8_PLANES 1: codes and x as bytes, for a row or two (split_int8.cuh).
M_TILES, tiles of 8 rows of x (with INT8_PLANES: rows), follows from M.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import UNFOLDED, Folded, Kernel
from lowq_kernels.cuda.operands import (
    TYPES,
    book,
    rows_of_table,
    rows_of_x,
    scales_zeros_bias,
    straddled,
    table_form,
    whole_product,
)
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import ANY_TABLE, Call, Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, chunks, padded_rows
from lowq_packers.scheme import Scheme

KEYS = ("WARPS", "ROW_TILES", "BLOCK_K", "STEPS_IN_FLIGHT", "BLOCKS_PER_SM", "INT8_PLANES")


def config_of(*values: int) -> Config:
    """The config of these values, in the order of KEYS; INT8_PLANES defaults to 0."""
    return dict(zip(KEYS, (*values, 0), strict=False))


CONFIGS: tuple[Config, ...] = tuple(config_of(*values) for values in (
    (16, 1, 128, 1, 2), (16, 1, 128, 1, 1), (16, 1, 128, 2, 1), (16, 1, 256, 1, 2), (16, 2, 128, 1, 1), (16, 2, 128, 2, 1),
    (16, 2, 256, 1, 1), (16, 2, 256, 2, 1), (12, 2, 128, 2, 1), (8, 1, 128, 2, 1), (8, 1, 128, 2, 4), (8, 1, 256, 1, 3),
    (8, 1, 256, 1, 1), (8, 1, 256, 2, 1), (8, 2, 128, 1, 1), (8, 2, 128, 2, 2), (8, 2, 128, 2, 1), (8, 2, 256, 1, 2),
    (8, 2, 256, 2, 1), (8, 2, 256, 2, 2), (4, 1, 128, 1, 1), (4, 1, 128, 1, 7), (4, 1, 128, 2, 1), (4, 1, 256, 1, 8),
    (4, 1, 256, 2, 4), (4, 1, 256, 2, 5), (4, 1, 256, 1, 1), (4, 2, 128, 1, 1), (4, 2, 128, 1, 4), (4, 2, 128, 1, 7),
    (4, 2, 128, 2, 1), (4, 2, 128, 2, 4), (4, 2, 256, 1, 1), (4, 2, 256, 1, 5), (4, 2, 256, 2, 1), (4, 2, 256, 2, 4),
    (2, 1, 256, 1, 1), (2, 2, 128, 1, 8), (2, 2, 128, 2, 1), (2, 4, 128, 1, 1), (2, 2, 256, 1, 1), (2, 4, 256, 1, 1),
)) + tuple(config_of(*values, 1) for values in (
    (16, 1, 256, 1, 1), (16, 1, 512, 1, 1), (16, 2, 256, 1, 1), (16, 2, 256, 2, 1), (16, 2, 512, 1, 1), (8, 1, 256, 1, 1),
    (8, 1, 512, 1, 1), (8, 2, 256, 1, 1), (8, 2, 256, 2, 1), (8, 2, 512, 1, 1), (8, 2, 512, 2, 1), (8, 4, 256, 1, 1),
    (8, 4, 256, 2, 1), (8, 4, 512, 1, 1), (4, 1, 256, 1, 1), (4, 1, 512, 1, 1), (4, 2, 256, 1, 1), (4, 2, 256, 2, 1),
    (4, 2, 512, 1, 5), (4, 4, 256, 1, 1), (4, 4, 256, 2, 1), (4, 4, 512, 1, 1), (2, 2, 512, 2, 1),
))  # fmt: skip
_numbers = itemgetter(*KEYS)  # in this order, whatever order a config has its keys in
PARAMETERS = (*(ctypes.c_void_p,) * 6, *(ctypes.c_int32,) * 7, Folded)
NORMED, ADDED, SILU, GELU_TANH = 1, 2, 4, 8  # bits of fold.cuh
GATED = SILU | GELU_TANH
MOST_ROWS = 32  # max. rows of x per block: M_TILES = 4
MOST_PLANES_ROWS = 2  # max. rows with INT8_PLANES: four rows need twice the scales and four times the work to prepare x


def form(scheme: Scheme, dtype: torch.dtype, config: Config) -> str:
    """The device code's FORM. EXACT is 4 half2 operations a fragment, but no sums of x and fewer registers than MAGIC."""
    if scheme.table:
        return table_form(scheme, bool(config["INT8_PLANES"]))
    return "INT8_PLANES" if config["INT8_PLANES"] else "EXACT" if dtype == torch.float16 else "MAGIC"


def registers(scheme: Scheme, K: int, dtype: torch.dtype, config: Config, tiles: int, copies: int) -> int:
    """An estimate of an instance's registers, fitted to where ptxas (sm_80 to sm_90a) starts to spill."""
    bits, group = scheme.bits, scheme.group_size
    groups = 1 if group % config["BLOCK_K"] == 0 or group == K else config["BLOCK_K"] // math.gcd(config["BLOCK_K"], group)
    words = bits * config["BLOCK_K"] // 64
    if config["INT8_PLANES"]:
        rounds = math.ceil(config["BLOCK_K"] * tiles / (4 * span(scheme, K)))
        fields = config["BLOCK_K"] // 16 if bits == 3 else 0  # of four bits, of the step that is computed
        metas = (1 if scheme.table else 2) * rounds
        fields += 12 if scheme.table else 0  # its bytes, and twice the sums
        return 40 + config["ROW_TILES"] * (config["STEPS_IN_FLIGHT"] * (words + metas) + fields + 8)
    nt, row = config["ROW_TILES"], group == K  # a row is one group
    loads = config["STEPS_IN_FLIGHT"] * nt * (words + groups * (1 if scheme.zero == "none" else 2))
    extra = (
        2 * nt * config["STEPS_IN_FLIGHT"] + 4 * nt * tiles if groups > 1 else 6 * nt * config["BLOCK_K"] // 128 if row else 0
    )
    extra += (11 * nt if bits == 3 else 0) + (4 if nt == 4 else 0)
    if (
        (config["BLOCK_K"], config["STEPS_IN_FLIGHT"], nt) == (128, 2, 1)
        and groups > 1
        and form(scheme, dtype, config) == "EXACT"
    ):
        extra -= 18  # ptxas needs no more where it is told to
    if scheme.table and scheme.table != "e2m1":  # four fragments' halves, looked up at a time
        extra += 16 * nt + 8
    if form(scheme, dtype, config) == "MAGIC":
        extra += 12 + 4 * (tiles - 1) + ((62 if row else 38) if bits <= 2 else 0)
        extra += 12 if bits * config["BLOCK_K"] * nt == 4096 else 0
    return 28 + loads + 10 * nt * tiles + 12 * (tiles - 1) + 2 * math.ceil(copies * 64 / config["BLOCK_K"]) + extra


def span(scheme: Scheme, K: int) -> int:
    """INT8_PLANES: the k whose x share a power of two, split_int8.cuh's SPAN."""
    return 128 if scheme.groups(K) == 1 else math.gcd(scheme.group_size, 128)


@dataclass(frozen=True)
class Tiling:
    """The launch of a call: M_TILES of 8 rows (INT8_PLANES: rows), `rows` of x per block, copies of x per lane and step, grid,
    bytes of shared memory."""

    M_TILES: int
    rows: int
    copies: int
    grid: tuple[int, int]
    smem: int


def plan(call: Call, config: Config, fold: int = 0) -> Tiling | None:
    """Blocks of at most 32 rows share M evenly; more blocks where their shared memory would not fit."""
    warps, nt = config["WARPS"], config["ROW_TILES"]
    at_once = 256 // config["BLOCK_K"]  # rows of x that one copy of a warp takes
    squares = call.K // 4 if fold & NORMED else 0  # bytes a row of x
    if config["INT8_PLANES"]:
        rows = 1 << (call.M - 1).bit_length()
        spans = rows * config["BLOCK_K"] // span(call.scheme, call.K)
        buffer = config["BLOCK_K"] // 32 * 288 + (spans + 2) // 2 * 16 + rows * config["BLOCK_K"] * 2
        smem = warps * max(buffer, nt * 256) + call.M * squares
        fits = smem <= gpu.of(call.capability).smem_block - 1024
        return Tiling(rows, call.M, 1, (padded_rows(call.N) // (16 * nt), 1), smem) if fits else None
    for blocks in range(math.ceil(call.M / MOST_ROWS), call.M + 1):
        rows = math.ceil(call.M / blocks)
        M_TILES = math.ceil(rows / 8)
        copies = 8 * M_TILES // at_once if M_TILES > 1 else 1 << (math.ceil(rows / at_once) - 1).bit_length()
        ring = config["STEPS_IN_FLIGHT"] * copies * at_once * (2 * config["BLOCK_K"] + 16)
        smem = warps * max(ring, nt * M_TILES * 512) + rows * squares
        if smem <= gpu.of(call.capability).smem_block - 1024:
            return Tiling(M_TILES, rows, copies, (padded_rows(call.N) // (16 * nt), math.ceil(call.M / rows)), smem)
        if rows == 1:
            return None
    return None


def expression(
    scheme: Scheme, K: int, dtype: torch.dtype, config: Config, M_TILES: int, copies: int, sms: int, fold: int = 0
) -> str:
    """The template instance of tile_mma.cu for a GPU of so many SMs."""
    bits, group = scheme.bits, 0 if scheme.groups(K) == 1 else scheme.group_size
    flags = f"{'true' if scheme.zero != 'none' else 'false'}, {form(scheme, dtype, config)}"
    warps, nt, step, unroll, blocks, _ = _numbers(config)
    tail = f"{warps}, {nt}, {step}, {unroll}, {M_TILES}, {copies}, {blocks}, {2 * sms}"
    tail += f", {fold}" if fold else ""
    return f"tile_mma<{bits}, {TYPES[dtype]}, {group}, {flags}, {tail}>"


def _planes_refuse(call: Call) -> str | None:
    table = call.scheme.table
    if call.scheme.bits == 8 or (table and call.scheme.bits < 4):
        return f"planes are for {'4 bits of a table' if table else 'up to 4 bits'}"
    if table == "e2m1":
        return "FP4 is slower as bytes than as halves"
    rows, k = 1 << (call.M - 1).bit_length(), span(call.scheme, call.K)
    if rows > MOST_PLANES_ROWS:
        return f"planes are for up to {MOST_PLANES_ROWS} rows"
    if k < 32:
        return "planes take whole groups of 32"
    return "a chunk has more spans than B columns for them" if rows * CHUNK[call.scheme.bits] > 4 * k else None


def _config_refuse(call: Call, config: Config) -> str | None:
    if config["BLOCK_K"] % CHUNK[call.scheme.bits]:
        return "BLOCK_K is not whole chunks of the layout"
    if config["INT8_PLANES"] and (why := _planes_refuse(call)):
        return why
    if config["INT8_PLANES"] and call.scheme.table and config["ROW_TILES"] > 2:
        return "two planes of a table's values for four row tiles spill"
    cut = plan(call, config)
    if cut is None:
        return "too much shared memory"
    cap = min(255, gpu.REGISTERS // (32 * config["WARPS"] * config["BLOCKS_PER_SM"]) // 8 * 8)
    if registers(call.scheme, call.K, call.dtype, config, cut.M_TILES, cut.copies) > cap:
        return "too many registers"
    return None


def _wasteful(call: Call, config: Config) -> bool:
    """Whether the config wastes warps, in one of two ways. With many row tiles, over a fifth of a block's warps have no step in
    the last round along K (27648x5120, M = 1: 29.3 us with 16 warps and steps of 256, 24.5 us with the next config). Or all
    blocks together have under seven warps per SM, each with little in flight (2 bits, M = 16, two warps per block, two tiles of
    128 k: 10240x8192 takes 36 us and 14336x4096 21 us; tile_int8x2 takes 15 and 10 us)."""
    limit = policy.model("cuda/tile_mma", gpu.of(call.capability))
    N, steps = padded_rows(call.N), math.ceil(call.K / config["BLOCK_K"])
    tiles, warps = N // 16, config["WARPS"]
    few = tiles // config["ROW_TILES"] * warps < limit["least_warps"]
    few = few and tiles * warps * config["BLOCK_K"] * config["STEPS_IN_FLIGHT"] < limit["least_k_in_flight"]
    return limit["above_N"] < N and (few or math.ceil(steps / warps) * warps > limit["most_rounded_steps"] * steps)


def _second_round(call: Call, config: Config) -> bool:
    """Whether, at 9 to 16 rows, an SM has registers for only one block of two row tiles (the estimate is up to 16 too high) and
    some SMs run two blocks in turn, as for 5120x2880 in groups of 64. The shipped rows are of fp16 in groups of 128, where two
    blocks fit."""
    cut = plan(call, config)
    if cut is None or (config["ROW_TILES"], cut.M_TILES, config["INT8_PLANES"]) != (2, 2, 0):
        return False
    needs = registers(call.scheme, call.K, call.dtype, config, cut.M_TILES, cut.copies) - 16
    return needs * 64 * config["WARPS"] > gpu.REGISTERS and 1 < cut.grid[0] / gpu.of(call.capability).sms <= 1.5


def _default_config(call: Call, legal: list[Config]) -> Config:
    """The first shipped config among those with the fewest blocks of x, hence the fewest passes over W."""
    cuts = [(c, cut) for c in legal if (cut := plan(call, c))]
    fewest = min(cut.grid[1] for _, cut in cuts)
    good = [c for c, cut in cuts if cut.grid[1] == fewest]
    candidates = policy.configs("cuda/tile_mma", call, math.ceil(call.M / fewest), KEYS)
    # Tables: shipped rows are of plain grids, whose halves cost less; 8192x8192 takes 19.8 us with two row tiles and
    # 22.0 us with one.
    if call.scheme.table:
        candidates.sort(key=lambda c: (not c["INT8_PLANES"], c["INT8_PLANES"] and c["ROW_TILES"] == 1))
    return next((c for c in candidates if c in good and not _wasteful(call, c) and not _second_round(call, c)), good[0])


@cache
def _prepared(
    M: int, N: int, K: int, bits: int, group: int, kind: str, dtype: torch.dtype, device: int, fold: int, *config: int
) -> tuple[Kernel, Tiling]:
    """The kernel of a call and its launch, resolved once. Its key is numbers: hashing a Call costs as much as a launch."""
    named = config_of(*config)
    scheme, on = Scheme.of(bits, group, kind), gpu.here(device)
    cut = plan(Call(M, N, K, scheme, "tile", dtype, "cuda", on.capability), named, fold)
    assert cut is not None  # checked by config_refuse
    instance = expression(scheme, K, dtype, named, cut.M_TILES, cut.copies, on.sms, fold)
    return _kernel(instance, device, named["WARPS"]), cut


@cache
def _kernel(instance: str, device: int, warps: int) -> Kernel:
    on = gpu.here(device)
    return Kernel("tile_mma.cu", instance, device, 32 * warps, PARAMETERS, on.smem_block - 1024, serialize=on.dependent_launch)


@register(
    "cuda/tile_mma",
    layouts=("tile",),
    tables=ANY_TABLE,
    devices=("cuda",),
    min_capability=gpu.LEAST,
    prefer=policy.prefers("cuda/tile_mma"),
    rank=20,
    configs=CONFIGS,
    config_refuse=_config_refuse,
    default_config=_default_config,
)
def tile_mma(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): fp32 sums, rounded once."""
    return launch(x, p, bias, config)


def launch(
    x: torch.Tensor,
    p: PackedWeight,
    bias: torch.Tensor | None,
    config: Config,
    fold: int = 0,
    folded: bytes = UNFOLDED,
) -> torch.Tensor:
    """tile_mma with the row-wise work of `fold` fused in (fold.cuh): (M, N), or (M, N / 2) if it is gated.

    Args:
        folded: the struct of that name as bytes; `lowq_kernels.decode.fold` makes it.
    """
    M = x.shape[0]
    y = torch.empty(M, p.N // 2 if fold & GATED else p.N, dtype=x.dtype, device=x.device)
    if M == 0:
        return y
    if straddled(p):
        return whole_product(x, p, bias)
    x = rows_of_x(x)
    scales, zeros, bias = scales_zeros_bias(p, bias, x.dtype)
    s = p.scheme
    companions = book(p) if s.table else zeros
    facts = (M, p.N, p.K, s.bits, s.group_size, s.kind, x.dtype, x.device.index, fold)
    kernel, cut = _prepared(*facts, *_numbers(config))
    sizes = (M, p.N, x.shape[1], chunks(p.K, s.bits), scales.shape[1], cut.rows, rows_of_table(p))
    of_W = (p.words.data_ptr(), scales.data_ptr(), 0 if companions is None else companions.data_ptr())
    pointers = (*of_W, 0 if bias is None else bias.data_ptr(), x.data_ptr(), y.data_ptr())
    kernel(*cut.grid, cut.smem, *pointers, *sizes, folded)
    return y
