"""triton/gemm_wide: large M on Hopper, dequantized on the way into the tensor cores. Written in Gluon, Triton's lower level.

Maths   y[m, n] = sum_k x[m, k] * (q[n, k] - z[n, g]) * s[n, g] + bias[n], computed as W @ x^T: W is wgmma's first operand,
        which may come from registers, so that decoded weights are never written anywhere
Shapes  as in product.py; K % 128 = 0, N % 8 = 0 (TMA wants rows of 16 bytes); groups of 64 codes or a multiple
Grid    one program a multiprocessor, each taking tiles of BLOCK_M rows of x by 128 rows of W in turn, in bands of m
Warps   one loads words and x by TMA into a ring of STAGES; two warp groups multiply 64 rows of W each. A group decodes
        the next 64 codes of k while its last product runs, and neither ever waits for the other
Codes   a lane of wgmma's first operand holds pairs of neighbouring codes, so a pair is decoded at once: its word's bits are
        moved under the exponent of a magic number (decode.py), q * s - z * s is one more multiply-add
"""

from functools import cache

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

from lowq_kernels.registry import Call, Config, register
from lowq_kernels.triton_wnax.decode import MAGIC, repeated
from lowq_kernels.triton_wnax.fit import processors
from lowq_packers.layouts import PackedWeight

TMA_ROWS = gl.constexpr(8)  # swizzled together: a step of 2 or 1 bits loads more rows of words than the 4 or 2 it uses
# (column, word) of 8 rows of words as lanes hold them, the words that a step does not use in registers of their own
EIGHT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 4], [0, 2], [8, 0], [0, 1]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
BLOCK_K = 64  # codes of k a step: 128 bytes of x, the widest row that TMA swizzles
ROWS_A_GROUP = 64  # rows of W that a warp group multiplies: wgmma's height
BAND_BYTES = 16 << 20  # of x that the tiles of one band read: a third of an H100's second-level cache
LOADER_REGISTERS, WORKER_REGISTERS = 40, 232


@cache
def pair_ptx(bits: int, dtype: torch.dtype) -> str:
    """PTX for one pair of codes: (word, first bit of the pair, scale twice, -zero * scale twice) -> two weights.

    Both codes come out as 2^m + q * 2^d; q is then exact, and q * s - z * s rounded once.
    """
    half, kind = dtype == torch.float16, "f16x2" if dtype == torch.float16 else "bf16x2"
    ones = (1 << bits) - 1
    magic, base, mantissa = MAGIC[dtype]
    pair = lambda lo, hi: _two(lo, dtype) | _two(hi, dtype) << 16  # noqa: E731
    lines = [".reg .b32 v, u, t;"]
    if bits == 8 and not half:  # 8 bits do not fit bf16's magic number: go through fp32's, 2^23
        lines += [".reg .f32 lo, hi;", "shr.b32 v, $2, $3;", "prmt.b32 u, v, 0x4b000000, 0x7440;"]
        lines += ["prmt.b32 t, v, 0x4b000000, 0x7441;", "mov.b32 lo, u; mov.b32 hi, t;"]
        lines += ["sub.f32 lo, lo, 0f4B000000;", "sub.f32 hi, hi, 0f4B000000;", "cvt.rn.bf16x2.f32 u, hi, lo;"]
    else:
        lines.append("shr.b32 v, $2, $3;")
        if 2 * bits <= mantissa:  # the second code may stay where it is, above the first: its weight is 2^bits
            lines += ["prmt.b32 u, v, v, 0x1010;", f"lop3.b32 u, u, {ones | ones << 16 + bits:#x}, {magic * 65537:#x}, 0xea;"]
            mul, minus = pair(1.0, 2.0**-bits), pair(-base, -base * 2.0**-bits)
        else:
            lines += [f"lop3.b32 u, v, {ones:#x}, {magic * 65537:#x}, 0xea;", f"shl.b32 t, v, {16 - bits};"]
            lines += [f"lop3.b32 u, t, {ones << 16:#x}, u, 0xea;"]
            mul, minus = pair(1.0, 1.0), pair(-base, -base)
        lines += [f"mov.b32 v, {mul:#x};", f"mov.b32 t, {minus:#x};", f"fma.rn.{kind} u, u, v, t;"]
    lines += [f"fma.rn.{kind} u, u, $4, $5;", "mov.b32 {$0, $1}, u;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _two(value: float, dtype: torch.dtype) -> int:
    """The 16 bits of a float that `dtype` holds exactly."""
    return int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF


@gluon.jit
def _load(
    words_desc, x_desc, words_smem, x_smem, full, empty, tiles_m, tiles_n, band, steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: words and x of each step of each tile of this program, into the next free stage."""
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, band)
        for step in range(steps):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, words_desc.block_type.nbytes + x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(words_desc, [step * ROWS, n * BLOCK_N], bar, words_smem.index(stage))
            tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, step * 64], bar, x_smem.index(stage))
            i += 1


@gluon.jit
def _place(tile, tiles_m, tiles_n, band):
    """Tile number -> (m, n). Bands of `band` tiles of m go over all of n: their x stays in the second-level cache."""
    first = tile // (band * tiles_n) * band
    size = gl.minimum(tiles_m - first, band)
    rest = tile % (band * tiles_n)
    return first + rest % size, rest // size


@gluon.jit
def _fetched(scales_ptr, zeros_ptr, offs_n, mask, k0, N, GROUP_SIZE: gl.constexpr, MID: gl.constexpr):
    """(scales, zeros) of each row of W for the codes from k0 on, on their way: used a round later, or the warp would wait."""
    at = gl.cast(k0 // GROUP_SIZE, gl.int64) * N + offs_n
    scales = gl.load(scales_ptr + at, mask=mask, other=0.0)
    zeros = scales if MID >= 0 else gl.load(zeros_ptr + at, mask=mask, other=0.0)
    return scales, zeros


@gluon.jit
def _twice(scales, zeros, MID: gl.constexpr, dtype: gl.constexpr):
    """(scale twice, -zero * scale twice) of each row of W, as pair_ptx takes them."""
    shift = scales.to(gl.float32) * (-MID if MID >= 0 else -zeros.to(gl.float32))
    s = scales.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    z = shift.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return s | (s << 16), z | (z << 16)


@gluon.jit
def _decoded(
    words_smem, scales, zeros, PTX: gl.constexpr, BITS: gl.constexpr, MID: gl.constexpr, dtype: gl.constexpr,
    ROWS: gl.constexpr, WHICH: gl.constexpr, PAIRS: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Words (ROWS, BLOCK_N) of a stage -> this group's weights (64, 64) as wgmma's first operand."""
    C: gl.constexpr = 64 // ROWS // 2  # pairs in a word
    group = words_smem.slice(WHICH * 64, 64, dim=1).permute((1, 0))
    if ROWS >= TMA_ROWS:
        words = group.load(gl.SliceLayout(2, PAIRS))
    else:  # TMA brought 8 rows, the step needs the first 4 or 2: the others fall away before they are read
        words = group.load(EIGHT)
        words, _ = gl.split(gl.permute(gl.reshape(words, (64, 2, 4)), (0, 2, 1)))
        if ROWS == 2:
            words, _ = gl.split(gl.permute(gl.reshape(words, (64, 2, 2)), (0, 2, 1)))
        words = gl.convert_layout(words, gl.SliceLayout(2, PAIRS), assert_trivial=True)
    s, z = _twice(scales, zeros, MID, dtype)
    first = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS))) * (2 * BITS)
    words, first = gl.expand_dims(words, 2), gl.expand_dims(gl.expand_dims(first, 0), 1)
    s, z = gl.expand_dims(gl.expand_dims(s, 1), 2), gl.expand_dims(gl.expand_dims(z, 1), 2)
    words, first = gl.broadcast(words, first)
    words, s = gl.broadcast(words, s)
    words, z = gl.broadcast(words, z)
    lo, hi = gl.inline_asm_elementwise(
        PTX, "=h,=h,r,r,r,r", [words, first, s, z], dtype=repeated(dtype, 2), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.reshape(gl.join(lo, hi), (64, 64)), A, assert_trivial=True)


@gluon.jit
def _multiply(
    scales_ptr, zeros_ptr, bias_ptr, y_desc, words_smem, x_smem, y_smem, full, empty, N, tiles_m, tiles_n, band, steps,
    PTX: gl.constexpr, BITS: gl.constexpr, GROUP_SIZE: gl.constexpr, MID: gl.constexpr, BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: rows WHICH * 64 .. + 63 of each tile."""
    xtype: gl.constexpr = y_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PAIRS))
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, band)
        m0 = m * BLOCK_M
        n0 = n * BLOCK_N + WHICH * 64
        offs_n = n0 + gl.arange(0, 64, ROW)
        mask_n = offs_n < N
        acc = gl.zeros((64, BLOCK_M), gl.float32, ACC)
        s, z = _fetched(scales_ptr, zeros_ptr, offs_n, mask_n, 0, N, GROUP_SIZE, MID)
        s1, z1 = _fetched(scales_ptr, zeros_ptr, offs_n, mask_n, 64, N, GROUP_SIZE, MID)
        s2, z2 = _fetched(scales_ptr, zeros_ptr, offs_n, mask_n, gl.minimum(2, steps - 1) * 64, N, GROUP_SIZE, MID)
        mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
        a = _decoded(words_smem.index(i % STAGES), s, z, PTX, BITS, MID, xtype, ROWS, WHICH, PAIRS, A)
        for step in range(0, steps - 2, 2):
            # a holds the weights of `step`; s1, z1 and s2, z2 are of the two steps after it
            flying = warpgroup_mma(a, x_smem.index(i % STAGES).permute((1, 0)), acc, is_async=True)
            s3, z3 = _fetched(scales_ptr, zeros_ptr, offs_n, mask_n, (step + 3) * 64, N, GROUP_SIZE, MID)
            k4 = gl.minimum(step + 4, steps - 1) * 64
            s4, z4 = _fetched(scales_ptr, zeros_ptr, offs_n, mask_n, k4, N, GROUP_SIZE, MID)
            mbarrier.wait(full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1)
            b = _decoded(words_smem.index((i + 1) % STAGES), s1, z1, PTX, BITS, MID, xtype, ROWS, WHICH, PAIRS, A)
            acc, a = warpgroup_mma_wait(0, deps=[flying, a])
            flying = warpgroup_mma(b, x_smem.index((i + 1) % STAGES).permute((1, 0)), acc, is_async=True)
            mbarrier.arrive(empty.index(i % STAGES), count=1)
            mbarrier.wait(full.index((i + 2) % STAGES), ((i + 2) // STAGES) & 1)
            a = _decoded(words_smem.index((i + 2) % STAGES), s2, z2, PTX, BITS, MID, xtype, ROWS, WHICH, PAIRS, A)
            acc, b = warpgroup_mma_wait(0, deps=[flying, b])
            mbarrier.arrive(empty.index((i + 1) % STAGES), count=1)
            s1, z1, s2, z2 = s3, z3, s4, z4
            i += 2
        flying = warpgroup_mma(a, x_smem.index(i % STAGES).permute((1, 0)), acc, is_async=True)
        mbarrier.wait(full.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1)
        b = _decoded(words_smem.index((i + 1) % STAGES), s1, z1, PTX, BITS, MID, xtype, ROWS, WHICH, PAIRS, A)
        acc, a = warpgroup_mma_wait(0, deps=[flying, a])
        mbarrier.arrive(empty.index(i % STAGES), count=1)
        flying = warpgroup_mma(b, x_smem.index((i + 1) % STAGES).permute((1, 0)), acc, is_async=True)
        acc, b = warpgroup_mma_wait(0, deps=[flying, b])
        mbarrier.arrive(empty.index((i + 1) % STAGES), count=1)
        i += 2
        if BIAS:
            offs_b = n0 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
            acc += gl.expand_dims(gl.load(bias_ptr + offs_b, mask=offs_b < N, other=0.0).to(gl.float32), 1)
        tma.store_wait(0)  # the tile before has left y_smem
        y_smem.index(WHICH).store(gl.permute(acc.to(xtype), (1, 0)))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [m0, n0], y_smem.index(WHICH))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "band"])
def _wide_kernel(
    words_desc, x_desc, y_desc, scales_ptr, zeros_ptr, bias_ptr, M, N, K, band,
    PTX: gl.constexpr, BITS: gl.constexpr, GROUP_SIZE: gl.constexpr, MID: gl.constexpr, BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr,
    LOADER: gl.constexpr, WORKER: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 64 * BITS // 32
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
                scales_ptr, zeros_ptr, bias_ptr, y_desc, words_smem, x_smem, y_smem, full, empty,
                N, tiles_m, tiles_n, band, steps,
                PTX, BITS, GROUP_SIZE, MID, BIAS, BLOCK_M, BLOCK_N, ROWS, STAGES, 0, PAIRS,
            )),
            (_multiply, (
                scales_ptr, zeros_ptr, bias_ptr, y_desc, words_smem, x_smem, y_smem, full, empty,
                N, tiles_m, tiles_n, band, steps,
                PTX, BITS, GROUP_SIZE, MID, BIAS, BLOCK_M, BLOCK_N, ROWS, STAGES, 1, PAIRS,
            )),
            (_load, (
                words_desc, x_desc, words_smem, x_smem, full, empty, tiles_m, tiles_n, band, steps,
                BLOCK_M, BLOCK_N, ROWS, STAGES,
            )),
        ],
        [4, 1],
        [WORKER, LOADER],
    )  # fmt: skip


@cache
def pairs_layout(bits: int) -> gl.DistributedLinearLayout:
    """Where wgmma's first operand (64, 64) keeps its pairs of codes, as (row of W, word, pair in the word)."""
    C = 16 // bits  # pairs in a word

    def place(pair: int) -> list[int]:
        return [0, pair // C, pair % C]

    registers = [[8, 0, 0], place(4), place(8), place(16)]
    lanes = [place(1), place(2), [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 32 // C, C])


def _launch(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N)."""
    x = x if x.data_ptr() % 16 == 0 else x.clone()  # TMA's rows begin on 16 bytes
    M, bits, BLOCK_M, BLOCK_N = x.shape[0], p.scheme.bits, config["BLOCK_M"], 2 * ROWS_A_GROUP
    y = torch.empty(M, p.N, dtype=x.dtype, device=x.device)
    words_block, x_block = [max(8, BLOCK_K * bits // 32), BLOCK_N], [BLOCK_M, BLOCK_K]
    words = TensorDescriptor.from_tensor(p.words, words_block, gl.NVMMASharedLayout(128, 32, rank=2))
    rows = TensorDescriptor.from_tensor(x, x_block, gl.NVMMASharedLayout(128, 16, rank=2))
    out = TensorDescriptor.from_tensor(y, [BLOCK_M, ROWS_A_GROUP], gl.NVMMASharedLayout(128, 16, rank=2))
    zeros = p.scales if p.zeros is None else p.zeros
    mid = {"none": 2.0 ** (bits - 1) if bits > 1 else 0.5}.get(p.scheme.zero, -1.0)
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(p.N, BLOCK_N)
    band = max(1, BAND_BYTES // (2 * BLOCK_M * p.K))
    _wide_kernel[(min(tiles, processors()),)](
        words, rows, out, p.scales, zeros, p.scales if bias is None else bias, M, p.N, p.K, band,
        PTX=pair_ptx(bits, x.dtype), BITS=bits, GROUP_SIZE=p.scheme.group_size, MID=mid, BIAS=bias is not None,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=config["STAGES"], PAIRS=pairs_layout(bits),
        LOADER=LOADER_REGISTERS, WORKER=WORKER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return y


def _refuse(call: Call) -> str | None:
    if call.capability[0] != 9:
        return f"wgmma is Hopper's, this GPU has capability {call.capability}"
    if call.K % (2 * BLOCK_K) or call.N % 8 or call.scheme.group_size % BLOCK_K:
        return f"K={call.K}, N={call.N}, group {call.scheme.group_size}; takes multiples of {2 * BLOCK_K}, 8 and {BLOCK_K}"
    return None


def cost(call: Call, config: Config) -> float:
    """Relative time by a count of rounds: tiles as tall as M asks, but enough of them for every multiprocessor."""
    tiles = triton.cdiv(call.M, config["BLOCK_M"]) * triton.cdiv(call.N, 2 * ROWS_A_GROUP)
    return triton.cdiv(tiles, processors()) * (config["BLOCK_M"] + 96)  # decoding a step takes as long as 96 columns of x


register(
    "triton/gemm_wide",
    layouts=("strided",),
    devices=("cuda",),
    bits=(8, 4, 2, 1),
    min_capability=(9, 0),
    preferred_m=(192, 2048),  # from there on dequant_matmul, whose pass over the weight then costs less than decoding again
    rank=45,
    configs=({"BLOCK_M": 256, "STAGES": 4}, {"BLOCK_M": 128, "STAGES": 6}, {"BLOCK_M": 64, "STAGES": 8}),
    refuse=_refuse,
    default_config=lambda call, legal: min(legal, key=lambda c: cost(call, c)),
)(_launch)
