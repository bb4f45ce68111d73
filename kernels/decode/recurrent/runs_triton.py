"""Runs of tokens through gated delta, Mamba2 and short convolutions by chunks, on tensor cores, for many sequences at once.

    conv    as `conv_triton`: q, k, v of delta; x, B, C of Mamba2, which are v, k and q here
    chunks  (tiles of CHUNK tokens, heads): decays, what tokens of a chunk read of one another, and with delta the inverse of
            the triangular system of what they write: blocks of PART tokens row by row, products for the rest
    scan    (dims of values in blocks, heads, runs): a block of a head's state (keys, values), in registers, goes through the
            chunks
    out     (tokens in blocks, heads): delta's norm and gate; Mamba2's norm is that of its step

Maths   delta   w = T beta (v - begin k S), T = (1 + tril(beta k k^T between, -1))^-1; Mamba2: w = dt x
        y = begin q S + (q k^T between) w;  S <- total S + k^T (end w)
        begin, end, between: decays from a chunk's begin, to its end, and from token to token, by sums in fp64
Rounded bf16: what is multiplied, in bf16. fp16: to tf32, as values have no bound. fp32: not at all
Source  own; Yang et al. 2024 (arXiv:2406.06484, 2412.06464), Dao and Gu 2024 (arXiv:2405.21060)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.decode.launch import overlap, pdl
from lowq_kernels.decode.recurrent import CHUNK, Runs, States
from lowq_kernels.decode.recurrent.conv_triton import GROUPED, PLAIN, SHORT, Conv, convolved_runs, silu, softplus
from lowq_kernels.decode.recurrent.delta import Delta, DeltaCall
from lowq_kernels.decode.recurrent.mamba2 import Mamba2, Mamba2Call
from lowq_kernels.decode.recurrent.short_conv import ShortConv, ShortConvCall
from lowq_kernels.decode.recurrent.steps_triton import MOST_NORMED, normed
from lowq_kernels.dispatch.registry import FLOATS, Config, register

MOST_KEYS = 256  # max. values per key
OUT_ROWS = 16  # tokens per program of `out`
PART: tl.constexpr = tl.constexpr(16)  # rows of a diagonal block of the triangular system, which is inverted row by row
IEEE, BF16, TF32 = 0, 1, 2
# Configs of `scan`: value dims per program, pipeline stages, warps; the first that fits into shared memory is used. H100, 1,000
# tokens, 32 heads of 128: bf16 (32, 3, 4) 48 us, (32, 2, 4) 66 us; fp16 one stage of 8 warps 110 us, two of 4 151 us (spills).
SHORT_KEYS = ((32, 2, 4), (32, 1, 4), (16, 1, 4))  # keys of fewer than 128 values: their tiles are too small for more warps
NARROW, WIDE = ((32, 3, 4), *SHORT_KEYS), ((32, 1, 8), (16, 1, 4))
# Mamba2's keys of more than 128 values in bf16 on Hopper: with fewer than 64 value dims per program, code of Triton 3.6 reads
# past its shared memory (compute-sanitizer, H200, 2026-11-26: 200 and 256 values; wrong numbers or a CUDA error).
DEEP = ((64, 2, 8), (64, 1, 4))
KINDS = {torch.float32: IEEE, torch.bfloat16: BF16, torch.float16: TF32}


@triton.jit
def _cut(x, KIND: tl.constexpr):
    """x rounded to the precision that KIND multiplies, in the type that holds it."""
    if KIND == 1:
        x = x.to(tl.bfloat16)
    elif KIND == 2:
        x = x.to(tl.float32)
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _dot(a, b, KIND: tl.constexpr):
    """a @ b of operands that `cut` has rounded."""
    if KIND == 0:
        y = tl.dot(a, b, input_precision="ieee")
    elif KIND == 1:
        y = tl.dot(a, b)
    else:
        y = tl.dot(a.to(tl.float32), b, input_precision="tf32")
    return y


@triton.jit
def _inverses(system, SIZE: tl.constexpr):
    """Of a lower triangular system (SIZE, SIZE), without the ones of its diagonal, the inverses of blocks of PART on it, in
    their place: row by row, all blocks at once, by substitution in fp32."""
    block, row, column = tl.arange(0, SIZE // PART), tl.arange(0, PART), tl.arange(0, PART)
    first = system + block * (PART * SIZE + PART)
    solved = tl.where(row[None, :, None] == column[None, None, :], 1.0, 0.0) + tl.zeros((SIZE // PART, PART, PART), tl.float32)
    for i in range(1, PART):
        own = tl.load(first[:, None] + i * SIZE + row[None, :])
        known = tl.sum(own[:, :, None] * solved, 1)
        solved = tl.where((row == i)[None, :, None], solved - known[:, None, :], solved)
    tl.debug_barrier()  # every thread has read the system
    tl.store(first[:, None, None] + row[None, :, None] * SIZE + column[None, None, :], solved)


@triton.jit
def _chunks_kernel(
    x_ptr, mixed_ptr, a_log_ptr, dt_ptr, tiles_ptr, solved_ptr, inside_ptr, factors_ptr, wide, C, q_first, k_first,
    b_first, a_first, step, by_dt, least, largest,
    HEADS: tl.constexpr, EACH: tl.constexpr, KD: tl.constexpr, DELTA: tl.constexpr, KIND: tl.constexpr, BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    number, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs, offs_k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_ptr + h).to(tl.float32)
    overlap(PDL, TRIGGER)
    first, end = tl.load(tiles_ptr + 4 * number), tl.load(tiles_ptr + 4 * number + 1)
    if first >= end:
        return
    rows = (first + offs).to(tl.int64)
    there = rows < end
    of = h // EACH * step + h % EACH
    dt = softplus(tl.load(x_ptr + rows * wide + a_first + of, mask=there, other=0.0).to(tl.float32) * by_dt + dt_bias)
    if DELTA:
        beta = 1.0 / (1.0 + tl.exp(-tl.load(x_ptr + rows * wide + b_first + of, mask=there, other=0.0).to(tl.float32)))
    else:
        dt = tl.minimum(tl.maximum(dt, least), largest)
        beta = dt
    beta, g = tl.where(there, beta, 0.0), tl.where(there, dt * -tl.exp(a_log), 0.0).to(tl.float64)
    total = tl.cumsum(g, 0)
    factors = factors_ptr + (number * HEADS + h) * 3 * SIZE + offs
    tl.store(factors, beta)
    tl.store(factors + SIZE, tl.exp(total.to(tl.float32)))
    tl.store(factors + 2 * SIZE, tl.exp((tl.sum(g, 0) - total).to(tl.float32)))
    lower = offs[:, None] >= offs[None, :]
    between = tl.where(lower, (total[:, None] - total[None, :]).to(tl.float32), 0.0)
    between = tl.where(lower, tl.exp(between), 0.0)
    mask = there[:, None] & (offs_k < KD)[None, :]
    own = mixed_ptr + rows[:, None] * C + (h // EACH * KD + offs_k)[None, :]
    q, k = tl.load(own + q_first, mask=mask, other=0.0), tl.load(own + k_first, mask=mask, other=0.0)
    square = (number * HEADS + h) * SIZE * SIZE + offs[:, None] * SIZE + offs[None, :]
    inside = tl.dot(q, tl.trans(k), input_precision="ieee") * between
    tl.store(inside_ptr + square, _cut(inside, KIND))
    if DELTA:
        system = tl.dot(k, tl.trans(k), input_precision="ieee") * between * beta[:, None]
        tl.store(solved_ptr + square, tl.where(offs[:, None] > offs[None, :], system, 0.0))
        tl.debug_barrier()
        _inverses(solved_ptr + (number * HEADS + h) * SIZE * SIZE, SIZE)
        block = offs // PART
        tl.debug_barrier()
        inverses = tl.load(solved_ptr + square, mask=block[:, None] == block[None, :], other=0.0)
        tl.debug_barrier()  # every thread has read them
        # (1 + A)^-1 with A = D^-1 - 1 + L, blocks D on the diagonal and L below: with N = D L, N^4 = 0, (1 - N) (1 + N^2) D
        PRECISION: tl.constexpr = "ieee" if KIND == 0 else "tf32x3"
        N = tl.dot(inverses, tl.where(block[:, None] > block[None, :], system, 0.0), input_precision=PRECISION)
        solved = inverses + tl.dot(N, tl.dot(N, inverses, input_precision=PRECISION), input_precision=PRECISION)
        solved -= tl.dot(N, solved, input_precision=PRECISION)
        tl.store(solved_ptr + square, _cut(solved, KIND).to(tl.float32))


@triton.jit
def _scan_kernel(
    x_ptr, mixed_ptr, d_ptr, state_ptr, runs_ptr, solved_ptr, inside_ptr, factors_ptr, y_ptr, wide, C, q_first, k_first,
    v_first, stride_k, stride_v, by_z,
    HEADS: tl.constexpr, EACH: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, DELTA: tl.constexpr, GATE: tl.constexpr,
    KIND: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), runs_ptr + 4 * tl.program_id(2)
    offs, offs_k, offs_v = tl.arange(0, SIZE), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < KD, offs_v < VD
    overlap(PDL, TRIGGER)
    begin, end, tile = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    held = state_ptr + (tl.load(run + 3).to(tl.int64) * HEADS + h) * KD * VD + offs_k[:, None] * stride_k
    held, mask = held + offs_v[None, :] * stride_v, mask_k[:, None] & mask_v[None, :] & (begin < end)
    S = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    for i in range(tl.cdiv(end - begin, SIZE)):
        rows = (begin + i * SIZE + offs).to(tl.int64)
        there = rows < end
        place = (tile + i).to(tl.int64) * HEADS + h
        own = mixed_ptr + rows[:, None] * C
        keys = own + (h // EACH * KD + offs_k)[None, :]
        k = tl.load(keys + k_first, mask=there[:, None] & mask_k[None, :], other=0.0)
        q = tl.load(keys + q_first, mask=there[:, None] & mask_k[None, :], other=0.0)
        mask_w = there[:, None] & mask_v[None, :]
        v = tl.load(own + v_first + (h * VD + offs_v)[None, :], mask=mask_w, other=0.0).to(tl.float32)
        square = place * SIZE * SIZE + offs[:, None] * SIZE + offs[None, :]
        factors = factors_ptr + place * 3 * SIZE + offs
        beta, decay, to_end = tl.load(factors), tl.load(factors + SIZE), tl.load(factors + 2 * SIZE)
        before = _cut(S, KIND)
        if DELTA:
            v = v - decay[:, None] * _dot(k, before, KIND)
        w = beta[:, None] * v
        if DELTA:
            solved = tl.load(solved_ptr + square)
            if KIND == 1:
                solved = solved.to(tl.bfloat16)
            w = _dot(solved, _cut(w, KIND), KIND)
        y = decay[:, None] * _dot(q, before, KIND) + _dot(tl.load(inside_ptr + square), _cut(w, KIND), KIND)
        all_of_it = tl.sum(tl.where(offs == SIZE - 1, decay, 0.0), 0)
        S = S * all_of_it + _dot(tl.trans(k), _cut(w * to_end[:, None], KIND), KIND)
        if not DELTA:
            y += tl.load(d_ptr + h).to(tl.float32) * v
            if GATE:
                z = tl.load(x_ptr + rows[:, None] * wide + (h * VD + offs_v)[None, :], mask=mask_w, other=0.0)
                y = y * silu(z.to(tl.float32) * by_z)
        tl.store(y_ptr + (rows[:, None] * HEADS + h) * VD + offs_v[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_w)
    tl.store(held, S.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _out_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr, M, wide, z_first, z_step, eps,
    HEADS: tl.constexpr, EACH: tl.constexpr, VD: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    h, offs_v = tl.program_id(1), tl.arange(0, BLOCK_V)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask_v = offs_v < VD
    mask = (rows < M) & mask_v[None, :]
    overlap(PDL, TRIGGER)
    at = (rows * HEADS + h) * VD + offs_v[None, :]
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    if LAYER:
        y = tl.where(mask, y - (tl.sum(y, 1) / VD)[:, None], 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / VD + eps)[:, None]
    if WEIGHT:
        y = y * tl.load(weight_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y = y + tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)[None, :]
    z = tl.load(x_ptr + rows * wide + z_first + h // EACH * z_step + h % EACH * VD + offs_v[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + at, (y * silu(z.to(tl.float32))).to(out_ptr.dtype.element_ty), mask=mask)


def refuse(call: DeltaCall | Mamba2Call | ShortConvCall) -> str | None:
    """Why the kernels do not take a call, or None."""
    if not call.run:
        return "takes runs, not one token of each sequence"
    keys = None if isinstance(call, ShortConvCall) else call.k_dim if isinstance(call, DeltaCall) else call.N
    if keys is None:
        return None
    delta, on = isinstance(call, DeltaCall), gpu.of(call.capability)
    if keys > MOST_KEYS or _scan(keys, KINDS[call.dtype], delta, on) is None:
        return f"takes keys of up to {MOST_KEYS} values that fit into shared memory, not {keys}"
    if isinstance(call, Mamba2Call) and call.norm and call.heads * call.dim > MOST_NORMED:
        return f"takes norms over up to {MOST_NORMED} values, not {call.heads * call.dim}"
    return None


def _scan(keys: int, kind: int, delta: bool, on: gpu.Gpu) -> tuple[int, int, int] | None:
    """The config of `scan` (value dims, stages, warps) that fits: tiles of each stage, and their operands."""
    K, stored, cut = padded(keys), 4 if kind == IEEE else 2, 2 if kind == BF16 else 4
    deep = K > 128 and kind == BF16 and not delta and on.wgmma
    for values, stages, warps in DEEP if deep else SHORT_KEYS if K < 128 else NARROW if kind == BF16 else WIDE:
        stage = CHUNK * ((2 * K + values) * stored + CHUNK * (4 + cut))
        if stages * stage + (K + 2 * CHUNK) * values * cut <= on.smem_block:
            return values, stages, warps
    return None


def padded(n: int) -> int:
    """The size of a dimension, padded to what tensor cores multiply."""
    return max(16, triton.next_power_of_2(n))


@dataclass(frozen=True)
class _Heads:
    """The parameters of a mixer: sizes, and the place of a head in a row of x and of the convolution's output."""

    delta: bool
    heads: int
    each: int  # heads of a key head
    keys: int
    values: int
    q_first: int
    k_first: int
    v_first: int
    strides: tuple[int, int]  # of keys and values in a head's state
    b_first: int = 0
    a_first: int = 0
    step: int = 0  # between the gates of two key heads
    by: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 0.0)  # of z and dt, and the limits of dt
    gate: bool = False


def _scanned(
    x: torch.Tensor, mixed: torch.Tensor, f: Delta | Mamba2, states: States, runs: Runs, y: torch.Tensor, how: _Heads
) -> None:
    """From the convolution's output to y (M, heads * values), before delta's norm and gate."""
    n, kind, BLOCK_K = runs.tiles.shape[0], KINDS[x.dtype], padded(how.keys)
    solved = torch.empty(n if how.delta else 0, how.heads, CHUNK, CHUNK, dtype=torch.float32, device=x.device)
    inside = torch.empty(n, how.heads, CHUNK, CHUNK, dtype=torch.bfloat16 if kind == BF16 else torch.float32, device=x.device)
    factors = torch.empty(n, how.heads, 3, CHUNK, dtype=torch.float32, device=x.device)
    sizes = {"HEADS": how.heads, "EACH": how.each, "KD": how.keys, "DELTA": how.delta, "KIND": kind, "BLOCK_K": BLOCK_K}
    C, by_z, by_dt, *limits = mixed.shape[1], *how.by
    _chunks_kernel[(n, how.heads)](
        x, mixed, f.a_log, f.dt_bias, runs.tiles, solved, inside, factors, x.shape[1], C, how.q_first, how.k_first,
        how.b_first, how.a_first, how.step, by_dt, *limits, **sizes, SIZE=CHUNK, num_warps=4, **pdl(x),
    )  # fmt: skip
    cut = _scan(how.keys, kind, how.delta, gpu.here(x.device.index))
    assert cut is not None
    BLOCK_V, stages, warps = cut
    _scan_kernel[(triton.cdiv(how.values, BLOCK_V), how.heads, runs.table.shape[0])](
        x, mixed, None if isinstance(f, Delta) else f.d, states["S"], runs.table, solved, inside, factors, y, x.shape[1], C,
        how.q_first, how.k_first, how.v_first, *how.strides, by_z, **sizes, VD=how.values, GATE=how.gate, BLOCK_V=BLOCK_V,
        SIZE=CHUNK, num_warps=warps, num_stages=stages, **pdl(x),
    )  # fmt: skip


def _made(x: torch.Tensor, width: int, runs: Runs, dtype: torch.dtype) -> torch.Tensor:
    """An output tensor (M, width): zeros if there are dummy rows, else uninitialised."""
    return (torch.empty if runs.whole else torch.zeros)(x.shape[0], width, dtype=dtype, device=x.device)


@register("triton/delta_runs", op="delta", dtypes=(*FLOATS, torch.float32), rank=40, refuse=refuse)
def delta(x: torch.Tensor, f: Delta, states: States, runs: Runs, config: Config) -> torch.Tensor:
    """As `delta.run` of each run."""
    x, (C, _), each, norm = x.contiguous(), f.weight.shape, f.v_heads // f.k_heads, f.norm
    mixed = torch.empty(x.shape[0], C, dtype=x.dtype, device=x.device)
    sizes = (f.k_heads, f.k_dim, f.v_dim, each)
    mode = GROUPED if f.grouped else PLAIN
    convolved_runs(x, f.weight, f.bias, states, runs, mixed, Conv(mode, 0, sizes, scale=f.k_dim**-0.5))
    keys, values = f.k_heads * f.k_dim, f.v_heads * f.v_dim
    b_first = C + values
    gates = (b_first, b_first + each, 2 * each) if f.grouped else (b_first, b_first + f.v_heads, each)
    places = (0, keys, 2 * keys, (f.v_dim, 1))
    y = _made(x, values, runs, torch.float32)
    _scanned(x, mixed, f, states, runs, y, _Heads(True, f.v_heads, each, f.k_dim, f.v_dim, *places, *gates))
    gate = (2 * f.k_dim + each * f.v_dim, 2 * f.k_dim + 2 * each * f.v_dim) if f.grouped else (C, each * f.v_dim)
    out = torch.empty(x.shape[0], values, dtype=x.dtype, device=x.device)
    _out_kernel[(triton.cdiv(x.shape[0], OUT_ROWS), f.v_heads)](
        y, x, norm.weight, norm.bias, out, x.shape[0], x.shape[1], *gate, norm.eps, HEADS=f.v_heads, EACH=each, VD=f.v_dim,
        LAYER=norm.kind == "layer", WEIGHT=norm.weight is not None, BIAS=norm.bias is not None, ROWS=OUT_ROWS,
        BLOCK_V=triton.next_power_of_2(f.v_dim), num_warps=4, **pdl(x),
    )  # fmt: skip
    return out


@register("triton/mamba2_runs", op="mamba2", dtypes=(*FLOATS, torch.float32), rank=40, refuse=refuse)
def mamba2(x: torch.Tensor, f: Mamba2, states: States, runs: Runs, config: Config) -> torch.Tensor:
    """As `mamba2.run` of each run."""
    x, (C, _), inner, each = x.contiguous(), f.weight.shape, f.heads * f.dim, f.heads // f.groups
    mixed = torch.empty(x.shape[0], C, dtype=x.dtype, device=x.device)
    ends = (inner, inner + f.groups * f.N)
    convolved_runs(x, f.weight, f.bias, states, runs, mixed, Conv(PLAIN, inner, ends=ends, by=f.scales[1:4]))
    y = _made(x, inner, runs, x.dtype if f.norm is None else torch.float32)
    places = (inner + f.groups * f.N, inner, 0, (1, f.N), 0, inner + C, each)
    by = (f.scales[0], f.scales[4], float(f.dt[0]), float(f.dt[1]))
    how = _Heads(False, f.heads, each, f.N, f.dim, *places, by, f.norm is None or not f.gate_last)
    _scanned(x, mixed, f, states, runs, y, how)
    return y if f.norm is None else normed(y, x, f)


@register("triton/short_conv_runs", op="short_conv", dtypes=(*FLOATS, torch.float32), rank=40, refuse=refuse)
def short_conv(x: torch.Tensor, f: ShortConv, states: States, runs: Runs, config: Config) -> torch.Tensor:
    """As `short_conv.run` of each run."""
    x = x.contiguous()
    y = _made(x, f.weight.shape[0], runs, x.dtype)
    convolved_runs(x, f.weight, f.bias, states, runs, y, Conv(SHORT))
    return y
