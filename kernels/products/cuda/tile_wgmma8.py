"""cuda/tile_int8, cuda/tile_fp8: x rounded to int8 or e4m3 per token, times codes of the tile layout, on 8-bit tensor cores.

Two launches: act_rows.cu rounds x and orders it as codes lie in words, tile_wgmma8.cu multiplies; both are described there.
A config: ROW_TILES_64 of 64 rows of W that each of two warpgroups owns (a tile is 128 * ROW_TILES_64 rows); BLOCK_M, rows of x
of a tile; SPLIT_K, blocks of a cluster that split K of one tile, for layers with fewer tiles than the GPU has SMs.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import TYPES, aligned, group_argument, scales_zeros_bias, share_of_block, weight_maps
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config, configs_of, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, ROWS, WORDS, padded_rows
from lowq_packers.scheme import Act, Scheme

KEYS = ("ROW_TILES_64", "BLOCK_M", "SPLIT_K")
CONFIGS = configs_of(KEYS, (
    (2, 128, 1), (2, 128, 2), (1, 128, 1), (1, 128, 2), (2, 64, 1), (2, 64, 2), (1, 64, 1), (1, 64, 2), (1, 64, 4),
))  # fmt: skip
PARAMETERS = (TensorMap,) * 5 + (ctypes.c_void_p,) * 5 + (ctypes.c_int32,) * 5 + (ctypes.c_void_p,) * 2
ROUND_PARAMETERS = (ctypes.c_void_p,) * 4 + (ctypes.c_int32,) * 3 + (
    ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float,
)  # fmt: skip
BLOCK_K = 128  # k per stage
BAND = 8192  # rows of W whose tiles run at the same time
MAX_STAGES = 8
MX = 32  # the only groups whose scales are powers of two: MXFP4's
# Of a block of act_rows. 4,096 rows of 14,336 values take 66.8 us in one round of 896 threads, 54.5 in four of 256 (H200).
MOST_THREADS = 256
MOST_HELD = 7  # rounds of 16 values per thread that act_rows holds, in 8 registers each
SHARED = share_of_block(gpu.HOPPER.smem_sm, 1)
GATES = {"": 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 4}  # what act_rows computes before it rounds
BEFORE = GATES | {"norm": 3}


def sum_span(group: int) -> int:
    """SG: k that the tensor core sums before the sum is scaled; group 0: a row is one group."""
    return 64 if group == 64 else 128


def plan(bits: int, group: int, config: Config) -> tuple[int, int]:
    """(stages, dynamic shared memory); under a split, the fp32 sums and the staging of outputs reuse the ring's memory.
    Groups of 32: MXFP4's."""
    tiles, split = 8 * config["ROW_TILES_64"], config["SPLIT_K"]
    words = BLOCK_K // CHUNK[bits] * tiles * WORDS[bits] * 4
    scales = 4 * 16 if group == MX else BLOCK_K // sum_span(group) * 32  # bytes of a row tile in a stage
    stage = -(-(config["BLOCK_M"] * BLOCK_K + words + tiles * scales) // 1024) * 1024
    zeros, staging, sums = (
        0 if group == MX else tiles * 1024,
        4 * 128 * rows_of_piece(config),
        config["ROW_TILES_64"] * config["BLOCK_M"] * 512,
    )
    stages = min(MAX_STAGES, (SHARED - zeros - (staging if split == 1 else 0)) // stage)
    return stages, stages * stage + zeros + staging if split == 1 else max(stages * stage + zeros, sums)


def rows_of_piece(config: Config) -> int:
    """Rows of y that a block stores at a time."""
    return min(64, config["BLOCK_M"] // config["SPLIT_K"])


def expression(bits: int, T: int, int8: bool, group: int, zeros: bool, config: Config, grouped: bool = False) -> str:
    """The template instance of tile_wgmma8.cu."""
    flags = ("false", "true")
    stages = plan(bits, group, config)[0]
    tile = f"{config['ROW_TILES_64']}, {config['BLOCK_M']}, {sum_span(group) // 32}, {stages}, {config['SPLIT_K']}"
    last = (grouped, group == MX) if group == MX else (grouped,) if grouped else ()
    band = ", ".join((str(BAND // (128 * config["ROW_TILES_64"])), *(flags[f] for f in last)))
    return f"tile_wgmma8<{bits}, {T}, {flags[int8]}, {group}, {flags[zeros]}, {tile}, {band}>"


def _refuse(call: Call) -> str | None:
    return why_not(call.scheme, call.K, call.act, call.capability)


def why_not(scheme: Scheme, K: int, act: Act, capability: tuple[int, int]) -> str | None:
    """Why the kernel does not take such weights under `act`, or None."""
    if why := gpu.no_wgmma(capability):
        return why
    bits, group = scheme.bits, scheme.group_size
    if scheme.table:
        mx = (scheme.table, scheme.scale, group, act) == ("e2m1", "e8m0", MX, "fp8") and K > MX
        return None if mx else "of values from a table it takes MXFP4's under fp8"
    if act == "fp8" and bits == 8:
        return "e4m3 cannot represent all codes of 8 bits"
    if group != K and group % 128 and not (group == 64 and CHUNK[bits] == 64):
        return f"groups of {group}: takes multiples of 128{' and 64' if CHUNK[bits] == 64 else ''}"
    return None


def _config_refuse(call: Call, config: Config) -> str | None:
    if config["SPLIT_K"] > math.ceil(call.K / BLOCK_K):
        return "nothing to split"
    if call.scheme.table and config["BLOCK_M"] < 128:
        return "MXFP4's codes take more instructions than 64 rows of x are worth"  # 487 and 607 us, see grouped_experts8.py
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


def block_of(K: int) -> tuple[int, int]:
    """(rounds, threads) of act_rows: a block holds a row of K, 16 values a thread and round. 0 rounds: it reads it twice."""
    units = math.ceil(K / BLOCK_K) * BLOCK_K // 16
    rounds = math.ceil(units / MOST_THREADS)
    return (rounds, math.ceil(units / rounds / 32) * 32) if rounds <= MOST_HELD else (0, 256)


@dataclass(frozen=True)
class Rounded:
    """What act_rows.cu makes of M rows of x: bytes x8 (M, steps * BLOCK_K), int8 or e4m3; sums in x's type (M, columns, filled
    up to a multiple of 8); scales (M,)."""

    x8: torch.Tensor
    sums: torch.Tensor
    scales: torch.Tensor
    columns: int
    int8: bool


EVERY_ROW, ROWS_WITH_TOKENS, ROWS_OF_TOKENS = range(3)  # the rows that act_rows rounds and writes: its WHICH


@cache
def _kernel(
    bits: int, T: int, int8: bool, in_pairs: bool, span: int, gate: str, which: int, rounds: int, threads: int, device: int
) -> Kernel:
    """in_pairs: a byte of x belongs to the fragment next to its neighbour's (INTERLEAVED)."""
    flags = f"{str(int8).lower()}, {CHUNK[bits]}, {str(in_pairs).lower()}"
    rounding = f"act_rows<{T}, {flags}, {span}, {rounds}, {BEFORE[gate]}, {which}, {threads}>"
    return Kernel("act_rows.cu", rounding, device, threads, ROUND_PARAMETERS, serialize=True)


def rounded(
    x: torch.Tensor,
    p: PackedWeight,
    int8: bool,
    gate: str = "",
    tokens: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> Rounded:
    """x (M, K) rounded per row, in the order in which codes of p lie in words.

    gate: one of GATES; x is then gate and up (M, 2 K), and act(gate) * up of them is what is rounded.
    tokens: (P,) int32; only rows with tokens > 0 are rounded. With slots (M * copies,) int32, all rows of x are, and row i is
        written to rows slots[copies * i], ... of P.
    """
    which = EVERY_ROW if tokens is None else ROWS_WITH_TOKENS if slots is None else ROWS_OF_TOKENS
    of_rows, blocks, copies = tokens, x.shape[0] if tokens is None else tokens.shape[0], 1
    if slots is not None:
        of_rows, blocks, copies = slots, x.shape[0], slots.shape[0] // x.shape[0]
    found = _unwritten(x.shape[0] if tokens is None else tokens.shape[0], p, x, int8)
    x = aligned(x)
    _launch(found, blocks, x.data_ptr(), p, gate, which, 0 if of_rows is None else of_rows.data_ptr(), copies)
    return found


def normed(
    stream: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, p: PackedWeight, int8: bool
) -> Rounded:
    """stream (M, K) += delta in place, and its RMSNorm with weight (K,), rounded as by `rounded`; block_of(K) holds a row."""
    found = _unwritten(stream.shape[0], p, stream, int8)
    delta = None if delta is None else aligned(delta)
    last = (stream.data_ptr(), weight.data_ptr(), eps)
    _launch(found, stream.shape[0], 0 if delta is None else delta.data_ptr(), p, "norm", EVERY_ROW, 0, 1, last)
    return found


def _unwritten(rows: int, p: PackedWeight, like: torch.Tensor, int8: bool) -> Rounded:
    width, device = math.ceil(p.K / BLOCK_K) * BLOCK_K, like.device
    columns = width // sum_span(group_argument(p))
    x8 = torch.empty(rows, width, dtype=torch.uint8, device=device)
    sums = torch.empty(rows, -(-columns // 8) * 8, dtype=like.dtype, device=device)
    return Rounded(x8, sums, torch.empty(rows, dtype=torch.float32, device=device), columns, int8)


def _launch(
    to: Rounded, blocks: int, x: int, p: PackedWeight, gate: str, which: int, of_rows: int, copies: int,
    last: tuple[int, int, float] = (0, 0, 0.0),
) -> None:  # fmt: skip
    """Run act_rows. x, of_rows: addresses; last: those of the stream and the norm's weight, and its eps."""
    bits, span, T = p.scheme.bits, sum_span(group_argument(p)), TYPES[to.sums.dtype]
    kernel = _kernel(
        bits, T, to.int8, bits == 8 or p.scheme.group_size == MX, span, gate, which, *block_of(p.K), to.x8.device.index
    )
    pointers = (x, to.x8.data_ptr(), to.sums.data_ptr(), to.scales.data_ptr())
    kernel(blocks, 1, 0, *pointers, p.K, to.x8.shape[1] // BLOCK_K, to.sums.shape[1], of_rows, copies, *last)


@cache
def _prepared(
    bits: int, T: int, int8: bool, group: int, zeros: bool, config: tuple[int, ...], device: int, grouped: bool
) -> tuple[Kernel, int]:
    """The kernel of a config and its shared memory, resolved once."""
    named: Config = dict(zip(KEYS, config, strict=True))
    smem = plan(bits, group, named)[1]
    instance = expression(bits, T, int8, group, zeros, named, grouped)
    return Kernel("tile_wgmma8.cu", instance, device, 384, PARAMETERS, smem, named["SPLIT_K"], serialize=True), smem


def multiply(
    x: Rounded, p: PackedWeight, bias: torch.Tensor | None, config: Config, N: int, experts: tuple[torch.Tensor, ...] = ()
) -> torch.Tensor:
    """x times p's weight (N, K), plus bias -> (M, N); with `experts`, tile i of BLOCK_M rows times the weight of its expert.

    experts: of each tile (M / BLOCK_M,), and how many rows there are (1,), int32; those after them stay unwritten. p has E * N
        rows then, each expert's filled up to whole row tiles, and bias is (E, N).
    """
    M, bits, device = x.x8.shape[0], p.scheme.bits, x.x8.device
    scales, zeros, bias = scales_zeros_bias(p, bias, x.sums.dtype)
    group, T, G = group_argument(p), padded_rows(N) // ROWS if experts else scales.shape[0], scales.shape[1]
    kernel, smem = _prepared(
        bits, TYPES[x.sums.dtype], x.int8, group, zeros is not None, tuple(config[n] for n in KEYS), device.index, bool(experts)
    )
    y = torch.empty(M, N, dtype=x.sums.dtype, device=device)
    tiles, nb, split = 8 * config["ROW_TILES_64"], config["BLOCK_M"], config["SPLIT_K"]
    all_tiles = math.ceil(T / tiles) * math.ceil(M / nb)
    blocks = all_tiles * split if split > 1 else min(all_tiles, gpu.here(device.index).sms)
    width, stride = x.x8.shape[1], x.sums.shape[1]
    maps = (
        tensor_map(x.x8.data_ptr(), 1, width, M, width, (BLOCK_K, nb), True),
        tensor_map(x.sums.data_ptr(), 2, x.columns, M, stride * 2, (64, nb), True),
        *weight_maps(p, scales, None, group, BLOCK_K, tiles)[:2],
    )
    y_map = tensor_map(y.data_ptr(), 2, N, M, N * 2, (64, rows_of_piece(config)), True) if N % 8 == 0 else maps[0]
    of_W = (scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
    pointers = (*of_W, x.scales.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    of_tiles = tuple(t.data_ptr() for t in experts) or (0, 0)
    kernel(blocks, 1, smem, *maps, y_map, *pointers, M, N, width // BLOCK_K, T, G, *of_tiles)
    return y


def product(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config, int8: bool, gate: str = ""
) -> torch.Tensor:
    """x (M, K) fp16 or bf16 -> (M, N): x rounded per token, 8-bit products summed exactly or in fp32, scaled in fp32.

    gate: see `rounded`.
    """
    if not x.shape[0]:
        return x.new_empty(0, p.N)
    return multiply(rounded(x, p, int8, gate), p, bias, config, p.N)


FACTS: dict[str, object] = {"layouts": ("tile",), "rank": 18, "configs": CONFIGS, "refuse": _refuse}
FACTS |= {"config_refuse": _config_refuse, "default_config": _default_config}


@register("cuda/tile_int8", bits=(8, 4, 3, 2), acts=("int8",), prefer=policy.prefers("cuda/tile_int8"), **FACTS)
def tile_int8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): x rounded to int8 per token, whole sums of every group, scaled and added in fp32."""
    return product(x, p, bias, config, True)


@register("cuda/tile_fp8", bits=(4, 3, 2), acts=("fp8",), tables=("", "e2m1"), prefer=policy.prefers("cuda/tile_fp8"), **FACTS)
def tile_fp8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): x rounded to e4m3 per token, sums of 128 k by the tensor core, scaled and added in fp32."""
    return product(x, p, bias, config, False)
