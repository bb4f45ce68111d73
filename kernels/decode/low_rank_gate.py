"""Low-rank additions (LoRA) of few rows to gate and up, in the gate's launch.

Maths   z = y + t B^T, rounded as between two launches;   h = act(gate of z) * up of z
Shapes  y (M, 2 I), B (S, 2 I, R), t (M, P, R, shares) fp32, h (M, I)
Grid    (groups of ROWS rows, blocks of BLOCK_I columns of h); neighbours of one adapter read its factors once
Launch  numbers of adapters and factors are read before the previous kernel has ended (launch.py)
Limits  up to FEW_ROWS rows (low_rank_triton.py)
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.elementwise import ACTS, _activated
from lowq_kernels.decode.launch import launch_next, pdl, wait
from lowq_kernels.decode.low_rank_factors import LowRank, Shrunk

GATED = tuple(act for act in ACTS if act != "clamped_swiglu")
# Columns of h in a program with factors of rank 16, fewer of larger ones: with 512 it spills, and a step of 64 rows of an 8B
# takes 3.76 instead of 3.72 ms (H200).
BLOCK_I = 256


@triton.jit
def _gate_factors(B_ptr, a, offs_i, there, width, R: tl.constexpr):
    """B of an adapter's gate and up (I, R) for columns of h; 0 if not `there`."""
    of_gate = B_ptr + a.to(tl.int64) * 2 * width * R + offs_i[:, None] * R + tl.arange(0, R)[None, :]
    w_gate = tl.load(of_gate, mask=there[:, None], other=0.0)
    return w_gate, tl.load(of_gate + width * R, mask=there[:, None], other=0.0)


@triton.jit
def _gate_rows_kernel(
    y_ptr, t_ptr, B_ptr, h_ptr, adapters_ptr, M, width, shares, gate_scale,
    ACT: tl.constexpr, P: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    offs_i, offs_r, offs_s = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I), tl.arange(0, R), tl.arange(0, BLOCK_S)
    inside = offs_i < width
    last = tl.load(adapters_ptr + first)  # the factors are those of this adapter
    launch_next(TRIGGER)
    w_gate, w_up = _gate_factors(B_ptr, last, offs_i, inside & (last > 0), width, R)
    wait(PDL)
    for m in tl.range(first, min(first + ROWS, M)):
        a = tl.load(adapters_ptr + m)
        if (a > 0) & (a != last):
            w_gate, w_up = _gate_factors(B_ptr, a, offs_i, inside, width, R)
            last = a
        there = (offs_s < shares) & (a > 0)
        t_ptrs = t_ptr + (m * P * R + offs_r[:, None]) * shares + offs_s[None, :]
        t_gate = tl.sum(tl.load(t_ptrs, mask=there[None, :], other=0.0), 1)
        t_up = tl.sum(tl.load(t_ptrs + (P - 1) * R * shares, mask=there[None, :], other=0.0), 1)
        y_ptrs = y_ptr + m * 2 * width + offs_i
        gate = tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32) + tl.sum(w_gate.to(tl.float32) * t_gate[None, :], 1)
        up = tl.load(y_ptrs + width, mask=inside, other=0.0).to(tl.float32) + tl.sum(w_up.to(tl.float32) * t_up[None, :], 1)
        gate, up = gate.to(y_ptr.dtype.element_ty).to(tl.float32), up.to(y_ptr.dtype.element_ty).to(tl.float32)
        h = _activated(gate * gate_scale, ACT) * up
        tl.store(h_ptr + m * width + offs_i, h.to(h_ptr.dtype.element_ty), mask=inside)


def gate_rows(
    y: torch.Tensor, shrunk: Shrunk, factors: LowRank, act: str, gate_scale: float, adapters: torch.Tensor
) -> torch.Tensor:
    """act(gate) * up (M, I) of y (M, 2 I) with what adapters add to it."""
    M, width, (_, P, R, _) = y.shape[0], y.shape[1] // 2, factors.A.shape
    block, rows = min(max(16, BLOCK_I * 16 // R), triton.next_power_of_2(width)), 2 if M <= 16 else 4
    h = torch.empty(M, width, dtype=y.dtype, device=y.device)
    _gate_rows_kernel[(triton.cdiv(M, rows), triton.cdiv(width, block))](
        y, shrunk.t, factors.B, h, adapters, M, width, shrunk.shares, gate_scale, ACT=act, P=P, R=R, ROWS=rows, BLOCK_I=block,
        BLOCK_S=triton.next_power_of_2(shrunk.shares), num_warps=4, **pdl(y),
    )  # fmt: skip
    return h


def takes_gate(factors: LowRank, act: str) -> bool:
    """Whether `gate_rows` takes these factors, of gate and up side by side, and this activation."""
    N, parts = factors.B.shape[1], len(factors.ends)
    return act in GATED and (parts == 1 or (parts == 2 and factors.ends[0] * 2 == N)) and N % 2 == 0
