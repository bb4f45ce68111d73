"""Low-rank additions (LoRA) of few rows in half the launches: they are part of the row-wise kernels next to the products.

Maths   norm_shrink   x' = x + delta, rounded;   y = norm(x');   t = (x' * weight) A^T, whose row times rms is the norm's shrink
        gate_shrink   z = y + t B^T, rounded as between two launches;   h = act(gate of z) * up of z;   t' = h A'^T
Shapes  x, delta (M, H); A (S, P, R, H); y (M, 2 I), B (S, 2 I, R), A' (S, 1, R', I); t (M, P, R, shares) fp32; rms (M,) fp32:
        the factor of each row's norm
Grid    norm_shrink   (M + groups * shares * P): a program for each row's norm, then one for each few rows, share of H and part
        gate_shrink   (groups of rows, shares of I); neighbours of one adapter read its factors once
Launch  numbers of adapters, factors and the norm's weight are read before the previous kernel has ended (launch.py)
Limits  up to FEW_ROWS rows (low_rank_triton.py); x' is another tensor than x, which the programs of the shares still read
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels.decode.elementwise import ACTS, _activated
from lowq_kernels.decode.launch import pdl
from lowq_kernels.decode.low_rank_factors import LowRank, Shrunk
from lowq_kernels.decode.low_rank_triton import BLOCK_K, MOST_VALUES, SHARES

GATED = tuple(act for act in ACTS if act != "clamped_swiglu")
# Rows of a program, which reads the factors of neighbours with one adapter once. 128 rows of an 8B, prompts of two adapters:
# norm and gate take 9.0 and 30.8 us, with one row 11.9 and 35.7, with eight 10.3 and 32.4 (H200). Steps of 16 rows need more
# programs: there a norm has one row, 2.3 instead of 2.8 us, and a gate two, 4.6 instead of 5.8.
ROWS = 4
# Max. columns of h in a program: 28 shares for the 14,336 columns of an 8B, which the next expand sums. Without a shrink 256
# are as fast at 16 rows and 1% faster at 64.
BLOCK_I, BLOCK_ADDED = 512, 256


@triton.jit
def _norm_row(
    x_ptr, delta_ptr, weight_ptr, new_ptr, y_ptr, rms_ptr, m, H, eps,
    HAS_DELTA: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK_H)
    mask = offs < H
    row = m.to(tl.int64) * H + offs
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        rounded = (x + tl.load(delta_ptr + row, mask=mask, other=0.0).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(new_ptr + row, rounded, mask=mask)
        x = rounded.to(tl.float32)
    rms = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(rms_ptr + m, rms)
    tl.store(y_ptr + row, (x * rms * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_share(
    x_ptr, delta_ptr, weight_ptr, A_ptr, t_ptr, adapters_ptr, first, share, p, M, H, shares,
    P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, HAS_DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offs_r, offs_h = tl.arange(0, R), share * SHARE + tl.arange(0, SHARE)
    mask = offs_h < H
    last = tl.load(adapters_ptr + first)  # w holds factors of this adapter
    rows = p * R * H + offs_r[:, None] * H + offs_h[None, :]
    w = tl.load(A_ptr + last.to(tl.int64) * P * R * H + rows, mask=mask[None, :] & (last > 0), other=0.0)
    weight = tl.load(weight_ptr + offs_h, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for m in tl.range(first, min(first + ROWS, M)):
        a = tl.load(adapters_ptr + m)
        if (a > 0) & (a != last):
            w = tl.load(A_ptr + a.to(tl.int64) * P * R * H + rows, mask=mask[None, :], other=0.0)
            last = a
        row = m * H + offs_h
        x = tl.load(x_ptr + row, mask=mask & (a > 0), other=0.0).to(tl.float32)
        if HAS_DELTA:
            delta = tl.load(delta_ptr + row, mask=mask & (a > 0), other=0.0).to(tl.float32)
            x = (x + delta).to(x_ptr.dtype.element_ty).to(tl.float32)
        t = tl.sum(w.to(tl.float32) * (x * weight)[None, :], 1)
        tl.store(t_ptr + ((m * P + p) * R + offs_r) * shares + share, t)


@triton.jit
def _norm_shrink_kernel(
    x_ptr, delta_ptr, weight_ptr, new_ptr, y_ptr, rms_ptr, A_ptr, t_ptr, adapters_ptr, M, H, eps, shares,
    P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if TRIGGER:
        gdc_launch_dependents()
    if pid < M:
        _norm_row(x_ptr, delta_ptr, weight_ptr, new_ptr, y_ptr, rms_ptr, pid, H, eps, HAS_DELTA, BLOCK_H, PDL)
    else:
        rest = pid - M
        _shrink_share(
            x_ptr, delta_ptr, weight_ptr, A_ptr, t_ptr, adapters_ptr, rest // (shares * P) * ROWS, rest // P % shares, rest % P,
            M, H, shares, P, R, ROWS, SHARE, HAS_DELTA, PDL,
        )  # fmt: skip


@triton.jit
def _gate_factors(B_ptr, A_ptr, a, offs_i, there, width, R: tl.constexpr, R_NEXT: tl.constexpr, SHRINKS: tl.constexpr):
    """An adapter's factors for columns of h: B of gate and up (I, R), A of the next product (R', I); 0 if not `there`."""
    B_a = B_ptr + a.to(tl.int64) * 2 * width * R
    of_gate = offs_i[:, None] * R + tl.arange(0, R)[None, :]
    w_gate = tl.load(B_a + of_gate, mask=there[:, None], other=0.0)
    w_up = tl.load(B_a + width * R + of_gate, mask=there[:, None], other=0.0)
    w_next = w_up
    if SHRINKS:
        A_a = A_ptr + a.to(tl.int64) * R_NEXT * width
        w_next = tl.load(A_a + tl.arange(0, R_NEXT)[:, None] * width + offs_i[None, :], mask=there[None, :], other=0.0)
    return w_gate, w_up, w_next


@triton.jit
def _gate_shrink_kernel(
    y_ptr, t_ptr, rms_ptr, B_ptr, A_ptr, h_ptr, next_ptr, adapters_ptr, M, width, shares, next_shares, gate_scale,
    ACT: tl.constexpr, P: tl.constexpr, R: tl.constexpr, R_NEXT: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_S: tl.constexpr, NORMED: tl.constexpr, SHRINKS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    first, block = tl.program_id(0) * ROWS, tl.program_id(1)
    offs_i, offs_r, offs_n = block * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, R), tl.arange(0, R_NEXT)
    offs_s, inside = tl.arange(0, BLOCK_S), offs_i < width
    last = tl.load(adapters_ptr + first)  # the factors are those of this adapter
    if TRIGGER:
        gdc_launch_dependents()
    w_gate, w_up, w_next = _gate_factors(B_ptr, A_ptr, last, offs_i, inside & (last > 0), width, R, R_NEXT, SHRINKS)
    if PDL:
        gdc_wait()
    for m in tl.range(first, min(first + ROWS, M)):
        a = tl.load(adapters_ptr + m)
        if (a > 0) & (a != last):
            w_gate, w_up, w_next = _gate_factors(B_ptr, A_ptr, a, offs_i, inside, width, R, R_NEXT, SHRINKS)
            last = a
        there = (offs_s < shares) & (a > 0)
        t_ptrs = t_ptr + (m * P * R + offs_r[:, None]) * shares + offs_s[None, :]
        rms = tl.load(rms_ptr + m) if NORMED else 1.0
        t_gate = tl.sum(tl.load(t_ptrs, mask=there[None, :], other=0.0), 1) * rms
        t_up = tl.sum(tl.load(t_ptrs + (P - 1) * R * shares, mask=there[None, :], other=0.0), 1) * rms
        y_ptrs = y_ptr + m * 2 * width + offs_i
        gate = tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32) + tl.sum(w_gate.to(tl.float32) * t_gate[None, :], 1)
        up = tl.load(y_ptrs + width, mask=inside, other=0.0).to(tl.float32) + tl.sum(w_up.to(tl.float32) * t_up[None, :], 1)
        gate, up = gate.to(y_ptr.dtype.element_ty).to(tl.float32), up.to(y_ptr.dtype.element_ty).to(tl.float32)
        h = (_activated(gate * gate_scale, ACT) * up).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + m * width + offs_i, h, mask=inside)
        if SHRINKS:
            t_next = tl.sum(w_next.to(tl.float32) * tl.where(inside, h.to(tl.float32), 0.0)[None, :], 1)
            tl.store(next_ptr + (m * R_NEXT + offs_n) * next_shares + block, t_next)


def norm_shrink(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, factors: LowRank, adapters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Shrunk]:
    """x (M, H) with delta added, a new tensor if there is a delta; its norm; and what the norm's product adds, before B."""
    (M, H), (_, P, R, _) = x.shape, factors.A.shape
    share = min(max(BLOCK_K, triton.next_power_of_2(triton.cdiv(H, SHARES))), max(16, MOST_VALUES // R))
    shares, y, BLOCK_H, rows = triton.cdiv(H, share), torch.empty_like(x), triton.next_power_of_2(H), 1 if M <= 16 else ROWS
    new = x if delta is None else torch.empty_like(x)
    t = torch.empty(M * P * R * shares, dtype=torch.float32, device=x.device)
    rms = torch.empty(M, dtype=torch.float32, device=x.device)
    _norm_shrink_kernel[(M + triton.cdiv(M, rows) * shares * P,)](
        x, delta, weight, new, y, rms, factors.A, t, adapters, M, H, eps, shares, P=P, R=R, ROWS=rows, SHARE=share,
        HAS_DELTA=delta is not None, BLOCK_H=BLOCK_H, num_warps=4, **pdl(x),
    )  # fmt: skip
    return new, y, Shrunk(t, shares, rms)


def gate_shrink(
    y: torch.Tensor, shrunk: Shrunk, up: LowRank, down: LowRank | None, act: str, gate_scale: float, adapters: torch.Tensor
) -> tuple[torch.Tensor, Shrunk | None]:
    """act(gate) * up (M, I) of y (M, 2 I) with what adapters add to it; and what the next product adds, before its B.

    down: that product's factors; None: it adds by itself.
    """
    M, width, (_, P, R, _), normed = y.shape[0], y.shape[1] // 2, up.A.shape, shrunk.rms is not None
    A, R_next = (None, 16) if down is None else (down.A, down.A.shape[2])
    block = min(BLOCK_ADDED if down is None else BLOCK_I, triton.next_power_of_2(width), max(16, MOST_VALUES // max(R, R_next)))
    shares, h, rows = triton.cdiv(width, block), torch.empty(M, width, dtype=y.dtype, device=y.device), 2 if M <= 16 else ROWS
    t = None if down is None else torch.empty(M * R_next * shares, dtype=torch.float32, device=y.device)
    _gate_shrink_kernel[(triton.cdiv(M, rows), shares)](
        y, shrunk.t, shrunk.rms, up.B, A, h, t, adapters, M, width, shrunk.shares, shares, gate_scale, ACT=act, P=P, R=R,
        R_NEXT=R_next, ROWS=rows, BLOCK_I=block, BLOCK_S=triton.next_power_of_2(shrunk.shares), NORMED=normed,
        SHRINKS=down is not None, num_warps=4, **pdl(y),
    )  # fmt: skip
    return h, None if t is None else Shrunk(t, shares)


def takes_gate(up: LowRank, down: LowRank | None, act: str) -> bool:
    """Whether `gate_shrink` takes these factors, of gate and up side by side and of the product behind, and this activation."""
    N, parts = up.B.shape[1], len(up.ends)
    sides = parts == 1 or (parts == 2 and up.ends[0] * 2 == N)
    return act in GATED and (down is None or len(down.ends) == 1) and sides and N % 2 == 0
