"""One token of each of many sequences, or a few of one, through gated delta, Mamba2 and short convolutions, states in place.

Several rows of one sequence are its newest token and drafts: after each the state is copied to a snapshot slot.

    conv   as `conv_triton`: gated delta and Mamba2 read what it writes, in fp32; of a short convolution it is all
    delta  (B, v_heads, values in blocks): columns of a head's state, read and written once. The last program of a head computes
           its norm and gate
    mamba2 (B, heads, dims in blocks): rows of a head's state. Where there is a norm over heads, a third kernel computes it

Early   with dependent launch, states are read before the previous kernel has ended: they were written in an earlier step
        (launch.py)
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.counters import counters
from lowq_kernels.decode.launch import launch_next, overlap, pdl, wait
from lowq_kernels.decode.recurrent import Rows, States
from lowq_kernels.decode.recurrent.conv_triton import (
    GROUPED,
    PLAIN,
    SHORT,
    Conv,
    channels,
    convolved,
    parted,
    place,
    silu,
    softplus,
)
from lowq_kernels.decode.recurrent.delta import EPS, Delta, DeltaCall
from lowq_kernels.decode.recurrent.mamba2 import Mamba2, Mamba2Call
from lowq_kernels.decode.recurrent.short_conv import ShortConv, ShortConvCall
from lowq_kernels.dispatch.registry import FLOATS, Config, register
from lowq_kernels.products.triton.partial import arrived_last

Steps = torch.Tensor | Rows  # slots of sequences with one token each, or rows of one sequence
LARGEST = 1 << 15  # max. values of a head's state
# Columns of a delta state per program, whatever the batch, so that a sequence's bits do not depend on it.
COLUMNS = 32
# Max. sequences whose convolution is part of the delta step, whose programs compute that of their key head. Both of 1, 2, 4, 8
# sequences, 48 heads on an H200: 5.9, 7.1, 13.6, 22.7 us, in two launches 6.6, 8.3, 11.8, 19.2.
CONVOLVED = 1
MOST_NORMED = 65536  # max. values of Mamba2's norm: one block of a program
LENGTHS: tl.constexpr = tl.constexpr(EPS)


@triton.jit
def _norm(y, weight_ptr, bias_ptr, n, eps, offs, mask, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """The norm of y's last dimension, n values in fp32; y is 0 outside the mask. offs: the places of their weights."""
    LAST: tl.constexpr = len(y.shape) - 1
    if LAYER:
        y = tl.where(mask, y - tl.sum(y, LAST, keep_dims=True) / n, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, LAST, keep_dims=True) / n + eps)
    if WEIGHT:
        y = y * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y = y + tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _row(token, mixed, b_at, a_at, at_q, keys, at_v, mask_k, mask_v):
    """b, a, q, k and v of a head in one row."""
    q, k = tl.load(mixed + at_q, mask=mask_k, other=0.0), tl.load(mixed + keys + at_q, mask=mask_k, other=0.0)
    return tl.load(token + b_at), tl.load(token + a_at), q, k, tl.load(mixed + at_v, mask=mask_v, other=0.0)


@triton.jit
def _past(inputs, weight_ptr, bias_ptr, c, mask, BIAS: tl.constexpr, W: tl.constexpr):
    """What the earlier inputs and the bias give to the convolution of channels c, and the newest input's weight; in fp32."""
    acc = tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32) if BIAS else tl.zeros(c.shape, tl.float32)
    for w in tl.static_range(W - 1):
        held = tl.load(inputs + c * (W - 1) + w, mask=mask, other=0.0).to(tl.float32)
        acc += held * tl.load(weight_ptr + c * W + w, mask=mask, other=0.0).to(tl.float32)
    return acc, tl.load(weight_ptr + c * W + W - 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _moved_on(inputs, new, c, mask, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """The inputs that channels c have after `new`, in their place."""
    w = tl.arange(0, BLOCK_W)
    at = inputs + (c * (W - 1))[:, None] + w[None, :]
    moved = tl.load(at + 1, mask=mask[:, None] & (w < W - 2)[None, :], other=0.0)
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(at, tl.where((w == W - 2)[None, :], new[:, None], moved), mask=mask[:, None] & (w < W - 1)[None, :])


@triton.jit
def _delta_kernel(
    x_ptr, mixed_ptr, taps_ptr, taps_bias_ptr, inputs_ptr, a_log_ptr, dt_ptr, weight_ptr, bias_ptr, state_ptr, slots_ptr,
    copies_ptr, sums_ptr, count_ptr, y_ptr, wide, scale, eps,
    KH: tl.constexpr, VH: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, GROUPED: tl.constexpr, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CONV: tl.constexpr, W: tl.constexpr, TAPS_BIAS: tl.constexpr,
    LENGTHEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALL_V: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """CONV: with the convolution of one row. All programs of a key head read its inputs, so the last of them moves these on.

    The state is written after the arrival, whose release would wait until these 16 KiB are in memory.
    """
    sequence, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    EACH: tl.constexpr = VH // KH
    C: tl.constexpr = 2 * KH * KD + VH * VD
    SHARE: tl.constexpr = EACH if CONV else 1  # heads whose programs have one last program
    PARTIES: tl.constexpr = SHARE * ALL_V // BLOCK_V
    offs_k, offs_v = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < KD, offs_v < VD
    mask = mask_k[:, None] & mask_v[None, :]
    launch_next(TRIGGER)
    own, head = tl.load(slots_ptr + sequence), h * KD * VD + offs_k[:, None] * VD + offs_v[None, :]
    held = state_ptr + own * VH * KD * VD + head
    S = tl.load(held, mask=mask, other=0.0).to(tl.float32)
    a_log, dt = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_ptr + h).to(tl.float32)
    k_head = h // EACH
    c_q, c_k, c_v = k_head * KD + offs_k, (KH + k_head) * KD + offs_k, 2 * KH * KD + h * VD + offs_v
    if CONV:
        inputs = inputs_ptr + own * C * (W - 1)
        q, tap_q = _past(inputs, taps_ptr, taps_bias_ptr, c_q, mask_k, TAPS_BIAS, W)
        k, tap_k = _past(inputs, taps_ptr, taps_bias_ptr, c_k, mask_k, TAPS_BIAS, W)
        v, tap_v = _past(inputs, taps_ptr, taps_bias_ptr, c_v, mask_v, TAPS_BIAS, W)
    wait(PDL)
    if GROUPED:
        z_at = k_head * (2 * KD + 2 * EACH * VD) + 2 * KD + EACH * VD + h % EACH * VD
        b_at = 2 * KH * KD + 2 * VH * VD + k_head * 2 * EACH + h % EACH
        a_at = b_at + EACH
    else:
        z_at, b_at = C + h * VD, C + VH * VD + h
        a_at = b_at + VH
    token, mixed = x_ptr + sequence * ROWS * wide, mixed_ptr
    if CONV:
        new_q = channels(token, c_q, mask_k, 0, C, KH, KD, VD, EACH, GROUPED).to(inputs_ptr.dtype.element_ty)
        new_k = channels(token, c_k, mask_k, 0, C, KH, KD, VD, EACH, GROUPED).to(inputs_ptr.dtype.element_ty)
        new_v = channels(token, c_v, mask_v, 0, C, KH, KD, VD, EACH, GROUPED).to(inputs_ptr.dtype.element_ty)
        b, a = tl.load(token + b_at), tl.load(token + a_at)
        q, k = silu(q + new_q.to(tl.float32) * tap_q), silu(k + new_k.to(tl.float32) * tap_k)
        v = silu(v + new_v.to(tl.float32) * tap_v)
    else:
        mixed += sequence * ROWS * C
        b, a, q, k, v = _row(token, mixed, b_at, a_at, c_q, KH * KD, c_v, mask_k, mask_v)
    for t in range(ROWS):
        row = sequence * ROWS + t
        beta, decay = 1.0 / (1.0 + tl.exp(-b.to(tl.float32))), tl.exp(-tl.exp(a_log) * softplus(a.to(tl.float32) + dt))
        if ROWS > 1:  # the next row's values are asked for before this one is computed
            step = tl.minimum(t + 1, ROWS - 1)
            b, a, next_q, next_k, next_v = _row(
                token + step * wide, mixed + step * C, b_at, a_at, c_q, KH * KD, c_v, mask_k, mask_v
            )  # fmt: skip
        if LENGTHEN:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + LENGTHS) * scale
            k = k * tl.rsqrt(tl.sum(k * k, 0) + LENGTHS)
        S = S * decay
        written = (v - tl.sum(S * k[:, None], 0)) * beta
        S = S + k[:, None] * written[None, :]
        if ROWS > 1:
            at = place(own, copies_ptr, sequence, t, ROWS) * VH * KD * VD
            tl.store(state_ptr + at + head, S.to(state_ptr.dtype.element_ty), mask=mask & (t < ROWS - 1))
        y, out = tl.sum(S * q[:, None], 0), (row * VH + h) * VD + offs_v
        if PARTIES == 1:
            z = tl.load(token + t * wide + z_at + offs_v, mask=mask_v, other=0.0).to(tl.float32)
            y = _norm(y, weight_ptr, bias_ptr, VD, eps, offs_v, mask_v, LAYER, WEIGHT, BIAS) * silu(z)
            tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask_v)
        else:
            tl.store(sums_ptr + out, y, mask=mask_v)
        if ROWS > 1:
            q, k, v = next_q, next_k, next_v
    if PARTIES > 1:
        if not arrived_last(count_ptr + (sequence * VH + h) // SHARE, PARTIES):
            tl.store(held, S.to(state_ptr.dtype.element_ty), mask=mask)
            if CONV:
                _moved_on(inputs, new_v, c_v, mask_v, W, BLOCK_W)
            return
        i, all_v = tl.arange(0, BLOCK_T)[:, None], tl.arange(0, ALL_V)[None, :]
        t, g = i // SHARE, i % SHARE
        there, row = (all_v < VD) & (t < ROWS), sequence * ROWS + t
        out = (row * VH + h // SHARE * SHARE + g) * VD + all_v
        z = tl.load(x_ptr + row * wide + z_at + (g - h % SHARE) * VD + all_v, mask=there, other=0.0).to(tl.float32)
        y = tl.load(sums_ptr + out, mask=there, other=0.0, cache_modifier=".cg")  # past the first-level cache
        y = _norm(y, weight_ptr, bias_ptr, VD, eps, all_v, there, LAYER, WEIGHT, BIAS) * silu(z)
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=there)
    tl.store(held, S.to(state_ptr.dtype.element_ty), mask=mask)
    if CONV:
        _moved_on(inputs, new_v, c_v, mask_v, W, BLOCK_W)
        _moved_on(inputs, new_q, c_q, mask_k, W, BLOCK_W)
        _moved_on(inputs, new_k, c_k, mask_k, W, BLOCK_W)


@triton.jit
def _mamba2_kernel(
    x_ptr, mixed_ptr, a_log_ptr, dt_ptr, d_ptr, state_ptr, slots_ptr, copies_ptr, y_ptr, wide, by_z, by_dt, least, largest,
    HEADS: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    sequence, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    C: tl.constexpr = HEADS * D + 2 * GROUPS * N
    offs_d, offs_n = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_d, mask_n = offs_d < D, offs_n < N
    mask = mask_d[:, None] & mask_n[None, :]
    launch_next(TRIGGER)
    own, head = tl.load(slots_ptr + sequence), h * D * N + offs_d[:, None] * N + offs_n[None, :]
    S = tl.load(state_ptr + own * HEADS * D * N + head, mask=mask, other=0.0).to(tl.float32)
    a_log, dt_bias = tl.load(a_log_ptr + h).to(tl.float32), tl.load(dt_ptr + h).to(tl.float32)
    skip, group = tl.load(d_ptr + h).to(tl.float32), h // (HEADS // GROUPS)
    wait(PDL)
    for t in range(ROWS):
        row = sequence * ROWS + t
        token, mixed = x_ptr + row * wide, mixed_ptr + row * C
        dt = softplus(tl.load(token + HEADS * D + C + h).to(tl.float32) * by_dt + dt_bias)
        dt = tl.minimum(tl.maximum(dt, least), largest)
        u = tl.load(mixed + h * D + offs_d, mask=mask_d, other=0.0)
        into = tl.load(mixed + HEADS * D + group * N + offs_n, mask=mask_n, other=0.0)
        out = tl.load(mixed + HEADS * D + (GROUPS + group) * N + offs_n, mask=mask_n, other=0.0)
        S = S * tl.exp(dt * -tl.exp(a_log)) + (dt * u)[:, None] * into[None, :]
        at = place(own, copies_ptr, sequence, t, ROWS) * HEADS * D * N
        tl.store(state_ptr + at + head, S.to(state_ptr.dtype.element_ty), mask=mask)
        y = tl.sum(S * out[None, :], 1) + skip * u
        if GATE:
            y = y * silu(tl.load(token + h * D + offs_d, mask=mask_d, other=0.0).to(tl.float32) * by_z)
        tl.store(y_ptr + (row * HEADS + h) * D + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def _normed_kernel(
    y_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr, wide, n, eps, by_z,
    GROUPS: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Grid (B, groups): the norm of a group of y, fp32, times silu(z) with GATE."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs, mask = group * n + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < n
    overlap(PDL, TRIGGER)
    y = tl.load(y_ptr + row * GROUPS * n + offs, mask=mask, other=0.0)
    y = _norm(y, weight_ptr, bias_ptr, n, eps, offs, mask, LAYER, WEIGHT, BIAS)
    if GATE:
        y = y * silu(tl.load(x_ptr + row * wide + offs, mask=mask, other=0.0).to(tl.float32) * by_z)
    tl.store(out_ptr + row * GROUPS * n + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


def refuse(call: DeltaCall | Mamba2Call | ShortConvCall) -> str | None:
    """Why the kernels do not take a call, or None."""
    if call.run:
        return "takes one token of each sequence, not a run"
    if isinstance(call, DeltaCall):
        tile = triton.next_power_of_2(call.k_dim) * triton.next_power_of_2(call.v_dim)
        return None if tile <= LARGEST else f"takes states of up to {LARGEST} values a head, not {call.k_dim} x {call.v_dim}"
    if isinstance(call, Mamba2Call) and call.norm and call.heads * call.dim > MOST_NORMED:
        return f"takes norms over up to {MOST_NORMED} values, not {call.heads * call.dim}"
    return None


def normed(y: torch.Tensor, x: torch.Tensor, f: Mamba2) -> torch.Tensor:
    """Mamba2's norm of y (M, inner) fp32, in x's dtype."""
    assert f.norm is not None
    norm, out = f.norm, torch.empty(y.shape, dtype=x.dtype, device=x.device)
    n = y.shape[1] // norm.groups
    BLOCK = triton.next_power_of_2(n)
    _normed_kernel[(y.shape[0], norm.groups)](
        y, x, norm.weight, norm.bias, out, x.shape[1], n, norm.eps, f.scales[0], GROUPS=norm.groups,
        LAYER=norm.kind == "layer", WEIGHT=norm.weight is not None, BIAS=norm.bias is not None, GATE=f.gate_last, BLOCK=BLOCK,
        num_warps=min(16, max(1, BLOCK // 256)), **pdl(x),
    )  # fmt: skip
    return out


@register("triton/delta", op="delta", dtypes=(*FLOATS, torch.float32), rank=40, refuse=refuse)
def delta(x: torch.Tensor, f: Delta, states: States, places: Steps, config: Config) -> torch.Tensor:
    """As `delta.step`."""
    x, B, norm, (C, W), each = x.contiguous(), x.shape[0], f.norm, f.weight.shape, f.v_heads // f.k_heads
    y, (slots, copies, rows) = x.new_empty(B, f.v_heads * f.v_dim), parted(x, places)
    conv, scale = W > 1 and rows == 1 and B <= CONVOLVED, f.k_dim**-0.5
    lengthen = rows == 1 or f.k_dim != triton.next_power_of_2(f.k_dim)  # else the convolution's programs are heads
    mixed = torch.empty(0 if conv else B, C, dtype=torch.float32, device=x.device)
    if not conv:
        mode = GROUPED if f.grouped else PLAIN
        convolved(
            x, f.weight, f.bias, states, places, mixed,
            Conv(mode, 0, (f.k_heads, f.k_dim, f.v_dim, each), scale=0.0 if lengthen else scale),
        )  # fmt: skip
    BLOCK_K, ALL_V = triton.next_power_of_2(f.k_dim), triton.next_power_of_2(f.v_dim)
    BLOCK_V = min(ALL_V, COLUMNS)
    sequences, parts, share = B // rows, ALL_V // BLOCK_V, each if conv else 1
    several = parts * share > 1
    sums = torch.empty(B * f.v_heads * f.v_dim if several else 0, dtype=torch.float32, device=x.device)
    count = counters(sequences * f.v_heads, x.device) if several else sums
    _delta_kernel[(sequences, f.v_heads, parts)](
        x, mixed, f.weight, f.bias, states["conv"], f.a_log, f.dt_bias, norm.weight, norm.bias, states["S"], slots, copies,
        sums, count, y, x.shape[1], scale, norm.eps,
        KH=f.k_heads, VH=f.v_heads, KD=f.k_dim, VD=f.v_dim, GROUPED=f.grouped, LAYER=norm.kind == "layer",
        WEIGHT=norm.weight is not None, BIAS=norm.bias is not None, CONV=conv, W=W, TAPS_BIAS=f.bias is not None,
        LENGTHEN=lengthen, ROWS=rows, BLOCK_K=BLOCK_K, BLOCK_V=BLOCK_V, ALL_V=ALL_V,
        BLOCK_W=triton.next_power_of_2(max(W - 1, 1)), BLOCK_T=triton.next_power_of_2(rows * share),
        num_warps=min(16, max(1, BLOCK_K * BLOCK_V // 1024)), **pdl(x),
    )  # fmt: skip
    return y


@register("triton/mamba2", op="mamba2", dtypes=(*FLOATS, torch.float32), rank=40, refuse=refuse)
def mamba2(x: torch.Tensor, f: Mamba2, states: States, places: Steps, config: Config) -> torch.Tensor:
    """As `mamba2.step`."""
    x, B, inner = x.contiguous(), x.shape[0], f.heads * f.dim
    mixed = torch.empty(B, f.weight.shape[0], dtype=torch.float32, device=x.device)
    ends = (inner, inner + f.groups * f.N)
    convolved(x, f.weight, f.bias, states, places, mixed, Conv(PLAIN, inner, ends=ends, by=f.scales[1:4]))
    y = torch.empty(B, inner, dtype=x.dtype if f.norm is None else torch.float32, device=x.device)
    BLOCK_N = triton.next_power_of_2(f.N)
    BLOCK_D = min(triton.next_power_of_2(f.dim), max(1, 4096 // BLOCK_N))
    slots, copies, rows = parted(x, places)
    _mamba2_kernel[(B // rows, f.heads, triton.cdiv(f.dim, BLOCK_D))](
        x, mixed, f.a_log, f.dt_bias, f.d, states["S"], slots, copies, y, x.shape[1], f.scales[0], f.scales[4],
        *map(float, f.dt), HEADS=f.heads, D=f.dim, GROUPS=f.groups, N=f.N, GATE=f.norm is None or not f.gate_last, ROWS=rows,
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N, num_warps=4, **pdl(x),
    )  # fmt: skip
    return y if f.norm is None else normed(y, x, f)


@register("triton/short_conv", op="short_conv", dtypes=(*FLOATS, torch.float32), rank=40, refuse=refuse)
def short_conv(x: torch.Tensor, f: ShortConv, states: States, places: Steps, config: Config) -> torch.Tensor:
    """As `short_conv.step`."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], f.weight.shape[0])
    convolved(x, f.weight, f.bias, states, places, y, Conv(SHORT))
    return y
