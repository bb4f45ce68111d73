"""triton/gemm_wide: 5 rows and more on Hopper, dequantized on the way into the tensor cores. In Gluon, Triton's lower level.

Maths   y[m, n] = sum_k x[m, k] * (q[n, k] - z[n, g]) * s[n, g] + bias[n], computed as W @ x^T: W is wgmma's first operand,
        which may come from registers, so that decoded weights are never written anywhere
Shapes  as in product.py; K % 128 = 0, N % 8 = 0 (TMA wants rows of 16 bytes); groups of 64 codes or a multiple
Grid    PER_SM programs a multiprocessor, each taking units in turn: tiles of BLOCK_M rows of x by 128 rows of W, in bands of
        m, or one of SPLIT_K ranges of k of such a tile. Partial sums meet as partial.py says
Warps   one loads words and x by TMA into a ring of STAGES; two warp groups multiply 64 rows of W each. A group decodes
        the next 64 codes of k while its last two products run (pairs.py), and neither group ever waits for the other
Limits  one program a multiprocessor waits for its own chain of load, decode, multiply: about 800 cycles a step of 64 k where
        wgmma takes 4 * BLOCK_M. Two programs share that wait; their registers allow 64 rows
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels import gpu
from lowq_kernels.counters import counters
from lowq_kernels.dispatch.registry import Call, Config, register
from lowq_kernels.products.triton.pairs import operand, pair_ptx, pairs_layout, pick, twice
from lowq_packers.layouts import PackedWeight

group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name until Triton 3.6; within a warp group here
BLOCK_K = 64  # codes of k a step: 128 bytes of x, the widest row that TMA swizzles
ROWS_A_GROUP = 64  # rows of W that a warp group multiplies: wgmma's height
BAND_BYTES = 16 << 20  # of x that the tiles of one band read: a third of an H100's second-level cache
WARPS = 12  # two groups, and the loading warp's, of which three idle
LOADER_REGISTERS = 24
SHARED_BYTES, RESERVED_BYTES = gpu.HOPPER.smem_sm, 1 << 10  # of an SM; of it the driver's, a program
MOST_PARTIALS = 64 << 20  # bytes: more sums than the second-level cache holds cost more than idle multiprocessors


@gluon.jit
def _load(
    words_desc, x_desc, words_smem, x_smem, full, empty, tiles_m, tiles_n, band, steps, splits,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: words and x of each step of each unit of this program, into the next free stage."""
    gdc_wait()  # x may be what the kernel before is still writing; nobody else reads or writes before x is here
    i = gl.to_tensor(0)
    for unit in range(gl.program_id(0), tiles_m * tiles_n * splits, gl.num_programs(0)):
        m, n, _, begin, end = _place(unit, tiles_m, tiles_n, band, steps, splits)
        for step in range(begin, end):
            stage = _stage(i, STAGES)
            mbarrier.wait(empty.index(stage), _phase(i, STAGES) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, words_desc.block_type.nbytes + x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(words_desc, [step * ROWS, n * BLOCK_N], bar, words_smem.index(stage))
            tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, step * 64], bar, x_smem.index(stage))
            i += 1


@gluon.jit
def _stage(i, STAGES: gl.constexpr):
    """Which stage of the ring step i uses. Unsigned: a signed remainder takes five instructions more."""
    return (i.to(gl.uint32) % STAGES).to(gl.int32)


@gluon.jit
def _phase(i, STAGES: gl.constexpr):
    """The parity of the ring's round that step i is in."""
    return ((i.to(gl.uint32) // STAGES) & 1).to(gl.int32)


@gluon.jit
def _place(unit, tiles_m, tiles_n, band, steps, splits):
    """Unit of work -> (m, n, split, its first step of k, the step after its last); the steps of a unit are even in number.

    Bands of `band` tiles of m go over all of n: their x stays in the second-level cache.
    """
    tile = unit % (tiles_m * tiles_n)
    split = unit // (tiles_m * tiles_n)
    first = tile // (band * tiles_n) * band
    size = gl.minimum(tiles_m - first, band)
    rest = tile % (band * tiles_n)
    begin = split * (steps // 2) // splits * 2
    end = (split + 1) * (steps // 2) // splits * 2
    return first + rest % size, rest // size, split, begin, end


@gluon.jit
def _fetched(scales_ptr, zeros_ptr, offs_n, step, last, N, GROUP_SIZE: gl.constexpr, MID: gl.constexpr):
    """(scales, zeros) of each row of W for the codes of a step, on their way: used a round later, or the warp would wait."""
    group = gl.minimum(step, last).to(gl.uint32) // (GROUP_SIZE // 64)
    at = group.to(gl.int64) * N
    scales = gl.load(scales_ptr + at + offs_n)
    zeros = scales if MID >= 0 else gl.load(zeros_ptr + at + offs_n)
    return scales, zeros


@gluon.jit
def _multiply(
    scales_ptr, zeros_ptr, bias_ptr, partials_ptr, counters_ptr, y_desc, words_smem, x_smem, y_smem, full, empty,
    N, tiles_m, tiles_n, band, steps, splits,
    PTX: gl.constexpr, PICK: gl.constexpr, GROUP_SIZE: gl.constexpr, MID: gl.constexpr, BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    WHICH: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: rows WHICH * 64 .. + 63 of each tile."""
    xtype: gl.constexpr = y_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PAIRS))
    ONE: gl.constexpr = GROUP_SIZE % 128 == 0  # both steps of a round lie in one group
    i = gl.to_tensor(0)
    for unit in range(gl.program_id(0), tiles_m * tiles_n * splits, gl.num_programs(0)):
        m, n, split, begin, end = _place(unit, tiles_m, tiles_n, band, steps, splits)
        m0 = m * BLOCK_M
        n0 = n * BLOCK_N + WHICH * 64
        offs_n = gl.minimum(n0 + gl.arange(0, 64, ROW), N - 1)  # rows past N are not stored
        last = steps - 1
        acc = gl.zeros((64, BLOCK_M), gl.float32, ACC)
        s0, z0 = _fetched(scales_ptr, zeros_ptr, offs_n, begin, last, N, GROUP_SIZE, MID)
        s1, z1 = s0, z0
        if not ONE:
            s1, z1 = _fetched(scales_ptr, zeros_ptr, offs_n, begin + 1, last, N, GROUP_SIZE, MID)
        s2, z2 = _fetched(scales_ptr, zeros_ptr, offs_n, begin + 2, last, N, GROUP_SIZE, MID)
        s, z = twice(s0, z0, MID, xtype)
        mbarrier.wait(full.index(_stage(i, STAGES)), _phase(i, STAGES))
        a = operand(words_smem.index(_stage(i, STAGES)), s, z, PTX, PICK, ROWS, WHICH, PAIRS, A, xtype)
        for step in range(begin, end - 2, 2):
            # a holds the weights of `step`; s1, z1 and s2, z2 are of the two steps after it. No product may be in flight
            # where the loop turns round: ptxas (12.8, C7512) then has every product wait for the one before
            flying = warpgroup_mma(a, x_smem.index(_stage(i, STAGES)).permute((1, 0)), acc, is_async=True)
            if not ONE:
                s, z = twice(s1, z1, MID, xtype)
                s1, z1 = _fetched(scales_ptr, zeros_ptr, offs_n, step + 3, last, N, GROUP_SIZE, MID)
            s4, z4 = _fetched(scales_ptr, zeros_ptr, offs_n, step + 4, last, N, GROUP_SIZE, MID)
            mbarrier.wait(full.index(_stage(i + 1, STAGES)), _phase(i + 1, STAGES))
            b = operand(words_smem.index(_stage(i + 1, STAGES)), s, z, PTX, PICK, ROWS, WHICH, PAIRS, A, xtype)
            flying = warpgroup_mma(b, x_smem.index(_stage(i + 1, STAGES)).permute((1, 0)), flying, is_async=True)
            acc, a = warpgroup_mma_wait(1, deps=[flying, a])
            mbarrier.arrive(empty.index(_stage(i, STAGES)), count=1)
            s, z = twice(s2, z2, MID, xtype)
            mbarrier.wait(full.index(_stage(i + 2, STAGES)), _phase(i + 2, STAGES))
            c = operand(words_smem.index(_stage(i + 2, STAGES)), s, z, PTX, PICK, ROWS, WHICH, PAIRS, A, xtype)
            acc, b = warpgroup_mma_wait(0, deps=[acc, b])
            mbarrier.arrive(empty.index(_stage(i + 1, STAGES)), count=1)
            a = c
            s2, z2 = s4, z4
            i += 2
        flying = warpgroup_mma(a, x_smem.index(_stage(i, STAGES)).permute((1, 0)), acc, is_async=True)
        if not ONE:
            s, z = twice(s1, z1, MID, xtype)
        mbarrier.wait(full.index(_stage(i + 1, STAGES)), _phase(i + 1, STAGES))
        b = operand(words_smem.index(_stage(i + 1, STAGES)), s, z, PTX, PICK, ROWS, WHICH, PAIRS, A, xtype)
        flying = warpgroup_mma(b, x_smem.index(_stage(i + 1, STAGES)).permute((1, 0)), flying, is_async=True)
        acc, a, b = warpgroup_mma_wait(0, deps=[flying, a, b])
        mbarrier.arrive(empty.index(_stage(i, STAGES)), count=1)
        mbarrier.arrive(empty.index(_stage(i + 1, STAGES)), count=1)
        i += 2
        whole = splits > 0
        if SPLIT:  # as in partial.py: fp32 slots, and whoever comes last adds them up in order
            place = (n * tiles_m + m) * 2 + WHICH
            offs = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, ACC)) * BLOCK_M, 1)
            offs += gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC)), 0)
            slots = partials_ptr + gl.cast(place, gl.int64) * splits * (64 * BLOCK_M) + offs
            gl.store(slots + split * (64 * BLOCK_M), acc)
            group_barrier()
            whole = gl.atomic_add(counters_ptr + place, 1, sem="acq_rel", scope="gpu") == splits - 1
            if whole:
                gl.atomic_xchg(counters_ptr + place, 0, sem="relaxed", scope="gpu")
                acc = gl.zeros((64, BLOCK_M), gl.float32, ACC)
                for other in range(splits):
                    acc += gl.load(slots + other * (64 * BLOCK_M), cache_modifier=".cg")
        if whole:
            if BIAS:
                offs_b = n0 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
                acc += gl.expand_dims(gl.load(bias_ptr + offs_b, mask=offs_b < N, other=0.0).to(gl.float32), 1)
            tma.store_wait(0)  # the tile before has left y_smem
            y_smem.index(WHICH).store(gl.permute(acc.to(xtype), (1, 0)))
            fence_async_shared()
            tma.async_copy_shared_to_global(y_desc, [m0, n0], y_smem.index(WHICH))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "band", "splits"])
def _wide_kernel(
    words_desc, x_desc, y_desc, scales_ptr, zeros_ptr, bias_ptr, partials_ptr, counters_ptr, M, N, K, band, splits,
    PTX: gl.constexpr, PICK: gl.constexpr, BITS: gl.constexpr, GROUP_SIZE: gl.constexpr, MID: gl.constexpr,
    BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    PAIRS: gl.constexpr, LOADER: gl.constexpr, WORKER: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 64 * BITS // 32
    gdc_launch_dependents()
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = K // 64
    words_smem = gl.allocate_shared_memory(gl.int32, [STAGES, words_desc.block_shape[0], BLOCK_N], words_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 64], x_desc.layout)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, [2, BLOCK_M, 64], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (
                scales_ptr, zeros_ptr, bias_ptr, partials_ptr, counters_ptr, y_desc, words_smem, x_smem, y_smem, full, empty,
                N, tiles_m, tiles_n, band, steps, splits,
                PTX, PICK, GROUP_SIZE, MID, BIAS, BLOCK_M, BLOCK_N, ROWS, STAGES, SPLIT, 0, PAIRS,
            )),
            (_multiply, (
                scales_ptr, zeros_ptr, bias_ptr, partials_ptr, counters_ptr, y_desc, words_smem, x_smem, y_smem, full, empty,
                N, tiles_m, tiles_n, band, steps, splits,
                PTX, PICK, GROUP_SIZE, MID, BIAS, BLOCK_M, BLOCK_N, ROWS, STAGES, SPLIT, 1, PAIRS,
            )),
            (_load, (
                words_desc, x_desc, words_smem, x_smem, full, empty, tiles_m, tiles_n, band, steps, splits,
                BLOCK_M, BLOCK_N, ROWS, STAGES,
            )),
        ],
        [4, 1],
        [WORKER, LOADER],
    )  # fmt: skip


def _registers(per_sm: int) -> dict[str, int]:
    """Registers a lane, where `per_sm` programs share a multiprocessor's 65536: the two groups get what the loader leaves."""
    each = 65536 // (32 * WARPS * per_sm) // 8 * 8
    return {"maxnreg": each, "LOADER": LOADER_REGISTERS, "WORKER": (each * WARPS - LOADER_REGISTERS * 4) // 8 // 8 * 8}


def _launch(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N)."""
    x = x if x.data_ptr() % 16 == 0 else x.clone()  # TMA's rows begin on 16 bytes
    M, bits, BLOCK_M, BLOCK_N = x.shape[0], p.scheme.bits, config["BLOCK_M"], config["BLOCK_N"]
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    words_block, x_block = [max(8, BLOCK_K * bits // 32), BLOCK_N], [BLOCK_M, BLOCK_K]
    words = TensorDescriptor.from_tensor(p.words, words_block, gl.NVMMASharedLayout(128, 32, rank=2))
    rows = TensorDescriptor.from_tensor(x, x_block, gl.NVMMASharedLayout(128, 16, rank=2))
    out = TensorDescriptor.from_tensor(y, [BLOCK_M, ROWS_A_GROUP], gl.NVMMASharedLayout(128, 16, rank=2))
    zeros = p.scales if p.zeros is None else p.zeros
    mid = {"none": 2.0 ** (bits - 1) if bits > 1 else 0.5}.get(p.scheme.zero, -1.0)
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(p.N, BLOCK_N)
    band = max(1, BAND_BYTES // (2 * BLOCK_M * p.K))
    splits, per_sm = config["SPLIT_K"], config["PER_SM"]
    partials = slots = p.scales  # neither is touched
    if splits > 1:
        partials = torch.empty(tiles * splits * BLOCK_M * BLOCK_N, dtype=torch.float32, device=x.device)
        slots = counters(2 * tiles, x.device)
    _wide_kernel[(min(tiles * splits, gpu.here(x.device.index).sms * per_sm),)](
        words, rows, out, p.scales, zeros, p.scales if bias is None else bias, partials, slots, M, p.N, p.K, band, splits,
        PTX=pair_ptx(bits, x.dtype), PICK=pick(bits, x.dtype), BITS=bits, GROUP_SIZE=p.scheme.group_size, MID=mid,
        BIAS=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=config["STAGES"], SPLIT=splits > 1,
        PAIRS=pairs_layout(bits), **_registers(per_sm), num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


def _refuse(call: Call) -> str | None:
    if why := gpu.no_wgmma(call.capability):
        return why
    if call.K % (2 * BLOCK_K) or call.N % 8 or call.scheme.group_size % BLOCK_K:
        return f"K={call.K}, N={call.N}, group {call.scheme.group_size}; takes multiples of {2 * BLOCK_K}, 8 and {BLOCK_K}"
    return None


def _config_refuse(call: Call, config: Config) -> str | None:
    if config["SPLIT_K"] > call.K // (2 * BLOCK_K):
        return "fewer steps of k than splits"
    tiles = triton.cdiv(call.M, config["BLOCK_M"]) * triton.cdiv(call.N, config["BLOCK_N"])
    partials = tiles * config["SPLIT_K"] * config["BLOCK_M"] * config["BLOCK_N"] * 4
    if config["SPLIT_K"] > 1 and partials > MOST_PARTIALS:
        return f"partial sums of {partials >> 20} MiB"
    need = config["PER_SM"] * (shared_bytes(call.scheme.bits, config) + RESERVED_BYTES)
    return (
        None if need <= SHARED_BYTES else f"needs {need >> 10} KiB of shared memory, a multiprocessor has {SHARED_BYTES >> 10}"
    )


def shared_bytes(bits: int, config: Config) -> int:
    """Shared memory of one program: the ring, the tile of y, the barriers."""
    stage = 4 * config["BLOCK_N"] * max(8, BLOCK_K * bits // 32) + 2 * BLOCK_K * config["BLOCK_M"]
    return config["STAGES"] * (stage + 16) + 2 * config["BLOCK_N"] * config["BLOCK_M"]


def cost(call: Call, config: Config) -> float:
    """About the microseconds on an H100: rounds of units, their steps, what a unit costs before and after them.

    Fitted to times at M = 8 .. 256 (8, 4, 2, 1 bits, 168 calls): its first choice took at most 10% more than the best config,
    which was always among its first three.
    """
    tall, splits = config["BLOCK_M"], config["SPLIT_K"]
    units = triton.cdiv(call.M, tall) * triton.cdiv(call.N, config["BLOCK_N"]) * splits
    sms = gpu.of(call.capability).sms
    rounds = triton.cdiv(units, sms * config["PER_SM"])
    shared = config["PER_SM"] > 1 and units > sms
    step = 0.40 + 0.003 * tall if shared else 0.27 + 0.0017 * tall
    sums = 1 + splits * tall / 64 if splits > 1 else 0
    return 3 + rounds * (triton.cdiv(call.K // BLOCK_K, splits) * step + 2 + sums)


# (BLOCK_M, STAGES, PER_SM) and its splits: what won somewhere on an H100
TILES = (
    ((256, 4, 1), (1, 2, 4)), ((128, 6, 1), (1, 2, 4)), ((64, 8, 1), (1, 2, 4)), ((64, 5, 2), (1, 2, 4, 8)),
    ((32, 8, 1), (1, 2, 4)), ((32, 8, 2), (1, 2, 4, 8)), ((16, 8, 1), (1, 2, 4)), ((16, 8, 2), (1, 2, 4, 8)),
)  # fmt: skip
register(
    "triton/gemm_wide",
    layouts=("strided",),
    devices=("cuda",),
    bits=(8, 4, 2, 1),
    preferred_m=(5, 1 << 62),
    prefer=lambda call: call.M > 16 or call.scheme.bits <= 2,  # up to 16 rows gemm_splitk was ahead at 8 and 4 bits
    rank=39,
    configs=tuple(
        {"BLOCK_M": m, "BLOCK_N": 2 * ROWS_A_GROUP, "STAGES": stages, "PER_SM": per_sm, "SPLIT_K": split}
        for (m, stages, per_sm), splits in TILES
        for split in splits
    ),
    refuse=_refuse,
    config_refuse=_config_refuse,
    default_config=lambda call, legal: min(legal, key=lambda c: cost(call, c)),
)(_launch)
