"""add_norm, activations, gates and soft caps: the row-wise work between the matmuls of a layer.

Grid    add_norm: one program per row of x; soft caps: values in blocks; the others: (M, cdiv(I, BLOCK))
Launch  with programmatic dependent launch on Hopper: the next kernel may start early, so each kernel waits for the one
        before it (gdc_wait) before it touches anything that is not a weight
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode import activation
from lowq_kernels.decode.launch import overlap, pdl

GATE_BLOCK = 1024
ROW_BLOCK = 2048  # values of a row that a program multiplies by the gate's weight at once
ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")  # activations of these kernels


@triton.jit
def _add_norm_kernel(
    x_ptr, delta_ptr, post_ptr, weight_ptr, y_ptr, H, eps,
    HAS_DELTA: tl.constexpr, HAS_POST: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK_H)
    mask = offs < H
    row = tl.program_id(0).to(tl.int64) * H + offs
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_POST:
        post = tl.load(post_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    overlap(PDL, TRIGGER)
    x = tl.load(x_ptr + row, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row, mask=mask, other=0.0).to(tl.float32)
        if HAS_POST:
            delta = delta * tl.rsqrt(tl.sum(delta * delta, 0) / H + eps) * post
            delta = delta.to(x_ptr.dtype.element_ty).to(tl.float32)
        rounded = (x + delta).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row, rounded, mask=mask)
        x = rounded.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * weight
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=mask)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, post: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.add_norm`; x, delta (M, H) contiguous."""
    M, H = x.shape
    y = torch.empty_like(x)
    BLOCK_H = triton.next_power_of_2(H)
    _add_norm_kernel[(M,)](
        x, delta, post, weight, y, H, eps, HAS_DELTA=delta is not None, HAS_POST=post is not None, BLOCK_H=BLOCK_H,
        num_warps=min(16, max(1, BLOCK_H // 256)), **pdl(x),
    )  # fmt: skip
    return y


@triton.jit
def _activated(x, ACT: tl.constexpr):
    """act(x) of x in fp32."""
    if ACT == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACT == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif ACT == "relu2":
        y = tl.where(x < 0.0, 0.0, x)
        y = y * y
    elif ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # gelu, tanh form: tanh(t) = 1 - 2 / (exp(2 t) + 1)
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    return y


@triton.jit
def _gated_kernel(
    gate_up_ptr, by_ptr, y_ptr, width, stride_by, gate_scale,
    ACT: tl.constexpr, GATED: tl.constexpr, TIMES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    overlap(PDL, TRIGGER)
    gate = tl.load(gate_up_ptr + row * (2 if GATED else 1) * width + offs, mask=mask, other=0.0).to(tl.float32) * gate_scale
    if GATED:
        up = tl.load(gate_up_ptr + row * 2 * width + width + offs, mask=mask, other=0.0).to(tl.float32)
    if ACT == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    elif GATED:
        y = _activated(gate, ACT) * up
    else:
        y = _activated(gate, ACT)
    if TIMES:
        y *= tl.load(by_ptr + row * stride_by + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def gated(gate_up: torch.Tensor, act: str, gate_scale: float = 1.0) -> torch.Tensor:
    """As `activation.gated`; gate_up (M, 2 I) contiguous."""
    if act not in ACTS:
        return activation.gated(gate_up, act, gate_scale)
    M, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(M, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (M, triton.cdiv(width, GATE_BLOCK))
    _gated_kernel[grid](
        gate_up, None, y, width, 0, gate_scale, ACT=act, GATED=True, TIMES=False, BLOCK=GATE_BLOCK, num_warps=4, **pdl(gate_up)
    )
    return y


def activated(x: torch.Tensor, act: str, by: torch.Tensor | None = None) -> torch.Tensor:
    """As `activation.activated`; x (M, I)."""
    if act not in ACTS or act == activation.CLAMPED or not x.is_contiguous() or (by is not None and by.stride(1) != 1):
        return activation.activated(x, act, by)
    M, width = x.shape
    y = torch.empty_like(x)
    grid = (M, triton.cdiv(width, GATE_BLOCK))
    _gated_kernel[grid](
        x, by, y, width, 0 if by is None else by.stride(0), 1.0, ACT=act, GATED=False, TIMES=by is not None, BLOCK=GATE_BLOCK,
        num_warps=4, **pdl(x),
    )  # fmt: skip
    return y


@triton.jit
def _softcapped_kernel(x_ptr, y_ptr, n, cap, BLOCK: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    overlap(PDL, TRIGGER)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    # tanh(t) = 1 - 2 / (exp(2 t) + 1) has an absolute error of 1e-7 cap, which does not matter to an fp32 logit near 0
    tl.store(y_ptr + offs, cap - 2.0 * cap / (tl.exp(2.0 * x / cap) + 1.0), mask=offs < n)


def softcapped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """As `activation.softcapped`."""
    if not x.is_contiguous():
        return activation.softcapped(x, cap)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _softcapped_kernel[(triton.cdiv(x.numel(), GATE_BLOCK),)](x, y, x.numel(), cap, BLOCK=GATE_BLOCK, num_warps=4, **pdl(x))
    return y


@triton.jit
def _opened_kernel(
    y_ptr, gate_ptr, weight_ptr, out_ptr, width, H,
    EACH: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """EACH: one gate per value; else one per row. OWN: a row's gate is the dot product of gate_ptr's row (H) and the weight."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < width
    overlap(PDL, TRIGGER)
    y = tl.load(y_ptr + row * width + offs, mask=mask, other=0.0).to(tl.float32)
    if EACH:
        gate = tl.load(gate_ptr + row * width + offs, mask=mask, other=0.0).to(tl.float32)
    elif OWN:
        acc = tl.zeros((BLOCK_H,), tl.float32)
        for start in range(0, H, BLOCK_H):
            here = start + tl.arange(0, BLOCK_H)
            x = tl.load(gate_ptr + row * H + here, mask=here < H, other=0.0).to(tl.float32)
            acc += x * tl.load(weight_ptr + here, mask=here < H, other=0.0).to(tl.float32)
        gate = tl.sum(acc, 0).to(out_ptr.dtype.element_ty).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * width + offs, (y / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=mask)


def _open(y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    M, width = y.shape
    out, H = torch.empty_like(y), gate.shape[1]
    each = weight is None and H > 1
    _opened_kernel[(M, triton.cdiv(width, GATE_BLOCK))](
        y, gate, weight, out, width, H, EACH=each, OWN=weight is not None, BLOCK=GATE_BLOCK,
        BLOCK_H=min(ROW_BLOCK, triton.next_power_of_2(H)), num_warps=4, **pdl(y),
    )  # fmt: skip
    return out


def opened(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `activation.opened`."""
    if not (y.is_contiguous() and gate.is_contiguous()):
        return activation.opened(y, gate)
    return _open(y, gate, None)


def opened_by(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `activation.opened_by`."""
    if not (y.is_contiguous() and x.is_contiguous() and weight.is_contiguous()):
        return activation.opened_by(y, x, weight)
    return _open(y, x, weight)
