"""cuda/fp8_gemm: products of e4m3 matrices with scales on Hopper's tensor cores. fp8_gemm.cu describes the kernel.

A config: SWAP, W's rows are the tensor core's 64 rows (small M) or its columns; ROW_TILES_64 of 64 rows that a warpgroup owns;
TILE_COLUMNS of a tile; SPLIT_K, blocks of a cluster that split K; WARPGROUPS_K, 2 where both warpgroups own the same rows and
take chunks of k in turn; BLOCKS_PER_SM; BAND, columns of the second operand whose tiles run side by side.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import TYPES, share_of_block
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Config, configs_of, register
from lowq_kernels.fp8.call import Fp8Call
from lowq_packers.errors import UnsupportedError
from lowq_packers.fp8 import Block, Fp8Matrix

BLOCK_K = 128  # k of a stage
VECTOR, GROUP, BLOCK = range(3)  # the device code's modes of scales
PARAMETERS = (TensorMap,) * 3 + (ctypes.c_void_p,) * 4 + (ctypes.c_int32,) * 9
SHARED = {blocks: share_of_block(gpu.HOPPER.smem_sm, blocks) for blocks in (1, 2)}  # by BLOCKS_PER_SM
MAX_STAGES = 24
KEYS = ("SWAP", "ROW_TILES_64", "TILE_COLUMNS", "SPLIT_K", "WARPGROUPS_K", "BLOCKS_PER_SM", "BAND")
LARGE = configs_of(KEYS, ((0, 2, 128, 1, 1, 1, 2048), (0, 1, 128, 1, 1, 1, 2048), (0, 1, 64, 1, 1, 1, 2048)))
SMALL = configs_of(
    KEYS,
    (
        (1, 1, nb, split, wk, blocks, 2048)
        for nb in (8, 16, 32, 64)
        for split, wk, blocks in ((1, 2, 1), (2, 2, 1), (4, 2, 1), (1, 2, 2), (4, 1, 2), (1, 1, 1))
    ),
)
CONFIGS = LARGE + SMALL


def mode_of(m: Fp8Matrix) -> int:
    """How the device code finds the scales of an operand."""
    return _mode(m.block, m.q.shape[1])


def _mode(block: Block, K: int) -> int:
    if block[0] == 1:
        return VECTOR if block[1] >= K else GROUP
    return BLOCK


def plan(config: Config, modes: tuple[int, int]) -> tuple[int, int]:
    """(stages, dynamic shared memory) of a config; modes of the first and second operand."""
    rows, nb, wk = 128 * config["ROW_TILES_64"] // config["WARPGROUPS_K"], config["TILE_COLUMNS"], config["WARPGROUPS_K"]
    groups = rows if modes[0] == GROUP else nb if modes[1] == GROUP else 0
    stage = (rows + nb) * BLOCK_K + -(-groups * 4 // 128) * 128
    split = config["SPLIT_K"] > 1
    staging = 8 * nb * 24 * 2 + (nb * 256 if wk == 2 else 0) if config["SWAP"] else 8 * 16 * (min(nb, 64) + 8) * 2
    stages = min(MAX_STAGES, (SHARED[config["BLOCKS_PER_SM"]] - (0 if split else staging)) // stage)
    stages -= stages % wk  # a stage always goes to the same warpgroup
    sums = 2 * config["ROW_TILES_64"] * nb * 256 if split else 0
    return stages, max(stages * stage + (0 if split else staging), sums, staging)


def expression(config: Config, T: int, modes: tuple[int, int]) -> str:
    """The template instance of fp8_gemm.cu."""
    stages, flags = plan(config, modes)[0], ("false", "true")
    swap, rows, columns, split, along_k, blocks, band = (config[k] for k in KEYS)
    tail = f"{rows}, {columns}, {stages}, {split}, {along_k}, {blocks}, {band // columns}"
    return f"fp8_gemm<{flags[swap]}, {T}, {modes[0]}, {modes[1]}, {tail}>"


def refuse(call: Fp8Call, config: Config) -> str | None:
    """The reason a config cannot multiply these operands, or None."""
    K = call.K
    if call.x_block is None:
        return "takes activations in fp8"
    for name, block in (("x", call.x_block), ("W", call.w_block)):
        if _mode(block, K) == GROUP and (name == "W" or block[1] != BLOCK_K):
            return f"{name} has a scale per {block[0]}x{block[1]}"
        if _mode(block, K) == BLOCK and block not in ((128, 128), (256, 256)):
            return f"{name} has blocks of {block[0]}x{block[1]}; takes 128x128 and 256x256"
    a, b = (call.w_block, call.x_block) if config["SWAP"] else (call.x_block, call.w_block)
    if _mode(b, K) == BLOCK and config["TILE_COLUMNS"] > b[0]:
        return "a tile is wider than a block"
    if K % 16:
        return f"K={K} is not a multiple of 16"
    if config["SPLIT_K"] > math.ceil(K / BLOCK_K):
        return "nothing to split"
    stages, smem = plan(config, (_mode(a, K), _mode(b, K)))
    return "too much shared memory" if stages < 2 or smem > SHARED[1] else None


def config_for(call: Fp8Call, legal: list[Config]) -> Config:
    """What was fastest for the like (docs/fp8.md): W's rows in front for few rows of x, x's beyond, by what a column takes."""
    M, N, K, sms = call.M, call.N, call.K, gpu.here().sms
    model = policy.model("cuda/fp8_gemm", gpu.of(call.capability))
    if model["swapped_up_to"] >= M:
        nb = max(8, 1 << (M - 1).bit_length())
        tiles = math.ceil(N / 64)
        split = max(k for k in (1, 2, 4) if k == 1 or (tiles * k <= sms and k <= K // BLOCK_K))
        return dict(zip(KEYS, (1, 1, nb, split, 2, 2 if tiles > sms else 1, 2048), strict=True))

    def cost(c: Config) -> float:
        rounds = math.ceil(math.ceil(M / (128 * c["ROW_TILES_64"])) * math.ceil(N / c["TILE_COLUMNS"]) / sms)
        rows, columns = c["ROW_TILES_64"], c["TILE_COLUMNS"]
        return rounds * rows * columns * model["column_cost"][f"{rows}x{columns}"]

    return min((c for c in LARGE if c in legal), key=cost)


@cache
def _prepared(config: tuple[int, ...], T: int, modes: tuple[int, int], device: int) -> tuple[Kernel, int]:
    named: Config = dict(zip(KEYS, config, strict=True))
    smem = plan(named, modes)[1]
    threads, instance = 288 if named["BLOCKS_PER_SM"] == 2 else 384, expression(named, T, modes)
    return Kernel("fp8_gemm.cu", instance, device, threads, PARAMETERS, smem, named["SPLIT_K"], serialize=True), smem


def _shift(size: int) -> int:
    return size.bit_length() - 1


def _groups(m: Fp8Matrix) -> torch.Tensor:
    """Scales of 1x128 groups stored by k, rows 16-byte aligned (the order that block_quant writes), (K / 128, M)."""
    s = m.scales.t()
    if s.stride(1) == 1 and s.stride(0) % 4 == 0 and s.data_ptr() % 16 == 0:
        return s
    wide = s.new_zeros(s.shape[0], (s.shape[1] + 3) // 4 * 4)
    wide[:, : s.shape[1]] = s
    return wide[:, : s.shape[1]]


@register(
    "cuda/fp8_gemm",
    op="fp8_product",
    rank=10,
    m_range=(0, 1 << 62),
    configs=CONFIGS,
    refuse=lambda call: gpu.no_wgmma(call.capability),
    config_refuse=refuse,
    default_config=config_for,
)
def fp8_gemm(x: Fp8Matrix, w: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, config: Config) -> torch.Tensor:
    """x (M, K) @ W (N, K)^T + bias -> (M, N) in `dtype` (fp16 or bf16): fp32 sums, rounded once."""
    (M, K), N = x.q.shape, w.q.shape[0]
    if why := refuse(Fp8Call.of(x, w, dtype), config):
        raise UnsupportedError(f"cuda/fp8_gemm cannot take this: {why}")
    y = torch.empty(M, N, dtype=dtype, device=x.q.device)
    if M == 0:
        return y
    a, b = (w, x) if config["SWAP"] else (x, w)
    modes = (mode_of(a), mode_of(b))
    kernel, smem = _prepared(tuple(config[n] for n in KEYS), TYPES[dtype], modes, x.q.device.index)
    rows, nb, split = 128 * config["ROW_TILES_64"] // config["WARPGROUPS_K"], config["TILE_COLUMNS"], config["SPLIT_K"]
    a_map = tensor_map(a.q.data_ptr(), 1, K, a.q.shape[0], K, (BLOCK_K, rows), True)
    b_map = tensor_map(b.q.data_ptr(), 1, K, b.q.shape[0], K, (BLOCK_K, nb), True)
    groups_map = a_map
    if GROUP in modes:
        by_k, wide = _groups(x), nb if modes[1] == GROUP else rows
        groups_map = tensor_map(by_k.data_ptr(), 4, by_k.shape[1], by_k.shape[0], by_k.stride(0) * 4, (wide, 1), False)
    tiles = math.ceil(a.q.shape[0] / rows) * math.ceil(b.q.shape[0] / nb)
    slots = gpu.here(x.q.device.index).sms * config["BLOCKS_PER_SM"]
    blocks = tiles * split if split > 1 else min(tiles, slots)
    kernel(
        blocks, 1, smem, a_map, b_map, groups_map, a.scales.data_ptr(), b.scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), a.q.shape[0], b.q.shape[0], math.ceil(K / BLOCK_K),
        _shift(a.block[0]), _shift(b.block[0]),
        a.scales.stride(0), b.scales.stride(0), _shift(a.block[1] // BLOCK_K), _shift(b.block[1] // BLOCK_K),
    )  # fmt: skip
    return y
