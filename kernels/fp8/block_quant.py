"""fp8_block_quant: bf16 or fp16 -> e4m3 with one scale per two-dimensional block, in one launch.

Maths   scale[i, j] = max(|x| over block i, j) / 448;  q = round_to_e4m3(x * (448 / max))
Shapes  x (M, K) rows contiguous · q (M, K) · scales (cdiv(M, BLOCK_M), cdiv(K, BLOCK_K)) fp32. Any M, any K
Plans   tile    one program holds a whole block in registers: the baseline, and the best plan for small blocks and many of them
        stride  one program walks a block in sub-tiles twice: running maxima of every position in registers, one reduction
                at the end; the second walk is served by L1 and L2. The plan of PyTorch's GridQuant article
        row     the same for one scale per row
        spread  PARTS programs hold a strip of a block each and tell each other their maxima: every element is read once,
                and 16 blocks (1024 x 1024) fill a GPU as 4096 do. They wait for each other, so a block's strips must run at
                once: programs start in order, so those of earlier blocks always can finish
Source  own; the stride plan after Less Wright et al., "GridQuant" (PyTorch blog, 2025)
"""

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.dispatch import policy
from lowq_packers.fp8 import FP8, FP8_MAX, LEAST, Block, Fp8Matrix

_MAX = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _scaled(x, amax):
    """x (any shape) as e4m3 under the block's maximum."""
    inverse = tl.math.div_rn(_MAX, amax)
    q = x.to(tl.float32) * inverse
    return tl.clamp(q, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _tile_kernel(
    x_ptr, q_ptr, s_ptr, M, K, stride_x, stride_sm, stride_sk,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS // BLOCK_M blocks down by GROUPS blocks across (1, 1 for large blocks)."""
    tiles_k = tl.cdiv(K, BLOCK_K * GROUPS)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    offs_m = pid_m.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = pid_k * (BLOCK_K * GROUPS) + tl.arange(0, BLOCK_K * GROUPS)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_x + offs_k[None, :], mask=mask, other=0.0)
    BLOCKS: tl.constexpr = ROWS // BLOCK_M
    x4 = tl.reshape(x, (BLOCKS, BLOCK_M, GROUPS, BLOCK_K))
    amax = tl.max(tl.abs(x4), 3)
    amax = tl.maximum(tl.max(amax, 1).to(tl.float32), _LEAST)
    q = tl.reshape(_scaled(x4, tl.reshape(amax, (BLOCKS, 1, GROUPS, 1))), (ROWS, BLOCK_K * GROUPS))
    tl.store(q_ptr + offs_m[:, None] * K + offs_k[None, :], q, mask=mask)
    rows = pid_m * BLOCKS + tl.arange(0, BLOCKS)
    columns = pid_k * GROUPS + tl.arange(0, GROUPS)
    inside = (rows < tl.cdiv(M, BLOCK_M))[:, None] & (columns < tl.cdiv(K, BLOCK_K))[None, :]
    tl.store(s_ptr + rows[:, None] * stride_sm + columns[None, :] * stride_sk, tl.math.div_rn(amax, _MAX), mask=inside)


@triton.jit
def _row_kernel(x_ptr, q_ptr, s_ptr, M, K, stride_x, stride_sm, stride_sk, STEP: tl.constexpr):
    """One scale per row: a program walks its row twice, the second time out of L1."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, STEP)
    running = tl.zeros((STEP,), tl.float32)
    for k0 in range(0, K, STEP):
        x = tl.load(x_ptr + row * stride_x + k0 + offs, mask=k0 + offs < K, other=0.0, eviction_policy="evict_last")
        running = tl.maximum(running, tl.abs(x).to(tl.float32))
    amax = tl.maximum(tl.max(running, 0), _LEAST)
    for k0 in range(0, K, STEP):
        x = tl.load(x_ptr + row * stride_x + k0 + offs, mask=k0 + offs < K, other=0.0)
        tl.store(q_ptr + row * K + k0 + offs, _scaled(x, amax), mask=k0 + offs < K)
    tl.store(s_ptr + row * stride_sm, tl.math.div_rn(amax, _MAX))


@triton.jit
def _stride_kernel(
    x_ptr, q_ptr, s_ptr, M, K, stride_x, stride_sm, stride_sk,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SUB_M: tl.constexpr, SUB_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    pid_m, pid_k = tl.program_id(0) // tiles_k, tl.program_id(0) % tiles_k
    sub_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, SUB_M)
    sub_k = pid_k * BLOCK_K + tl.arange(0, SUB_K)
    ACROSS: tl.constexpr = BLOCK_K // SUB_K
    STEPS: tl.constexpr = (BLOCK_M // SUB_M) * ACROSS
    running = tl.zeros((SUB_M, SUB_K), tl.float32)
    for i in tl.range(STEPS, num_stages=1, loop_unroll_factor=2):
        offs_m, offs_k = sub_m + i // ACROSS * SUB_M, sub_k + i % ACROSS * SUB_K
        mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * stride_x + offs_k[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
        running = tl.maximum(running, tl.abs(x).to(tl.float32))
    amax = tl.maximum(tl.max(tl.max(running, 1), 0), _LEAST)
    for i in tl.range(STEPS, num_stages=1, loop_unroll_factor=2):
        offs_m, offs_k = sub_m + i // ACROSS * SUB_M, sub_k + i % ACROSS * SUB_K
        mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * stride_x + offs_k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        tl.store(q_ptr + offs_m[:, None] * K + offs_k[None, :], _scaled(x, amax), mask=mask)
    tl.store(s_ptr + pid_m * stride_sm + pid_k * stride_sk, tl.math.div_rn(amax, _MAX))


@triton.jit
def _spread_kernel(
    x_ptr, q_ptr, s_ptr, M, K, stride_x, stride_sm, stride_sk, maxima_ptr, counters_ptr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    SUB_M: tl.constexpr = BLOCK_M // PARTS
    block, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    tiles_k = tl.cdiv(K, BLOCK_K)
    pid_m, pid_k = block // tiles_k, block % tiles_k
    offs_m = pid_m.to(tl.int64) * BLOCK_M + part * SUB_M + tl.arange(0, SUB_M)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_x + offs_k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    amax = tl.max(tl.max(tl.abs(x), 1), 0).to(tl.float32)
    if PARTS > 1:
        tl.store(maxima_ptr + block * PARTS + part, amax)
        tl.debug_barrier()  # the store before the release
        arrived = tl.atomic_add(counters_ptr + block, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < PARTS:
            arrived = tl.atomic_add(counters_ptr + block, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        amax = tl.max(tl.load(maxima_ptr + block * PARTS + tl.arange(0, PARTS), cache_modifier=".cg"), 0)
        left = tl.atomic_add(counters_ptr + block, 1, sem="relaxed", scope="gpu")
        if left == 2 * PARTS - 1:  # everyone has read; the next launch finds zeros
            tl.atomic_xchg(counters_ptr + block, 0, sem="relaxed", scope="gpu")
    amax = tl.maximum(amax, _LEAST)
    tl.store(q_ptr + offs_m[:, None] * K + offs_k[None, :], _scaled(x, amax), mask=mask)
    if part == 0:
        tl.store(s_ptr + pid_m * stride_sm + pid_k * stride_sk, tl.math.div_rn(amax, _MAX))


Plan = dict[str, int | str]
# What the benchmark times besides the choice of `plan_for`: the baseline, and the article's plan at its own tile and at ours.
TILE_PLANS: tuple[Plan, ...] = tuple({"PLAN": "tile", "num_warps": w} for w in (4, 8, 16, 32))
STRIDE_PLANS: tuple[Plan, ...] = tuple(
    {"PLAN": "stride", "SUB_M": m, "SUB_K": k, "num_warps": w} for m, k, w in ((32, 32, 4), (32, 256, 8), (64, 256, 8))
)
SPREAD_PLANS: tuple[Plan, ...] = tuple({"PLAN": "spread", "PARTS": p, "num_warps": w} for p, w in ((4, 4), (8, 4)))


def plan_for(M: int, K: int, block: Block) -> Plan:
    """What was fastest (docs/fp8.md) for a matrix of this size."""
    model = policy.model("fp8_block_quant", gpu.here())
    if block[0] == 1:
        if block[1] != 128:
            return {"PLAN": "row", "num_warps": 8}
        rows, groups = (1, 8) if model["rows_together_from"] > M else (16, 2)
        return {"PLAN": "tile", "ROWS": rows, "GROUPS": groups, "num_warps": 4}
    if block[0] * block[1] < model["tile_below"]:
        return {"PLAN": "tile", "num_warps": 8}
    blocks = triton.cdiv(M, block[0]) * triton.cdiv(K, block[1])
    if blocks < model["spread_below"]:  # fewer than multiprocessors: several programs a block
        return SPREAD_PLANS[1]
    return STRIDE_PLANS[2] if blocks < model["stride_below"] else TILE_PLANS[1]


def empty_scales(M: int, K: int, block: Block, device: torch.device) -> torch.Tensor:
    """(cdiv(M, block[0]), cdiv(K, block[1])) fp32. Per-token groups lie transposed, each column 16-byte aligned: the order
    in which a product (ours by TMA, and cuBLAS) reads them."""
    rows, columns = triton.cdiv(M, block[0]), triton.cdiv(K, block[1])
    if block[0] > 1:
        return torch.empty(rows, columns, dtype=torch.float32, device=device)
    return torch.empty(columns, (rows + 3) // 4 * 4, dtype=torch.float32, device=device).t()[:rows]


def fp8_block_quant(x: torch.Tensor, block: Block, plan: Plan | None = None) -> Fp8Matrix:
    """x (M, K) fp16, bf16 or fp32, rows contiguous, in e4m3; scales lie as `empty_scales` says."""
    (M, K), (BLOCK_M, BLOCK_K) = x.shape, block
    config = plan or plan_for(M, K, block)
    q, scales = torch.empty(M, K, dtype=FP8, device=x.device), empty_scales(M, K, block, x.device)
    facts: dict[str, object] = {k: v for k, v in config.items() if k != "PLAN"}
    operands = (x, q, scales, M, K, x.stride(0), scales.stride(0), scales.stride(1))
    blocks = scales.numel()
    if not blocks:
        return Fp8Matrix(q, scales, block)
    if config["PLAN"] == "tile":
        rows, groups = int(facts.pop("ROWS", BLOCK_M)), int(facts.pop("GROUPS", 1))  # type: ignore[call-overload]
        grid = triton.cdiv(M, rows) * triton.cdiv(K, BLOCK_K * groups)
        _tile_kernel[(grid,)](*operands, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, GROUPS=groups, ROWS=rows, **facts)
    elif config["PLAN"] == "row":
        _row_kernel[(M,)](*operands, STEP=min(4096, triton.next_power_of_2(K)), **facts)
    elif config["PLAN"] == "stride":
        _stride_kernel[(blocks,)](*operands, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, **facts)
    else:
        parts = int(config["PARTS"])
        maxima = torch.empty(blocks * parts, dtype=torch.float32, device=x.device)
        counts = counters(blocks, x.device)
        _spread_kernel[(blocks * parts,)](*operands, maxima, counts, BLOCK_M=BLOCK_M, BLOCK_K=BLOCK_K, **facts)
    return Fp8Matrix(q, scales, block)
