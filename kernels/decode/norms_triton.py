"""Any family's norm, and the update of the residual stream with the norm behind it, in one kernel.

Maths   x <- (x + scale * post(delta + second)) * after, rounded; y = norm(x). Each part may be missing, delta and second may
        each be normed before they are added (OWN), and x may have two norms (ALSO)
Grid    (rows); a row is (groups, values of a group), of which there is one group but in Mamba2's norms
Limits  rows of up to 65,536 values; factors and biases of one row, for all rows
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode import norms as definition
from lowq_kernels.decode.launch import launch_next, overlap, pdl, wait
from lowq_kernels.decode.norms import ALONE, Addition, Norm

MOST = 65536


@triton.jit
def _factors(weight_ptr, bias_ptr, offs, mask, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """Weight and bias of a norm in fp32. They are loaded before the wait for the previous kernel."""
    weight, bias = 1.0, 0.0
    if WEIGHT:
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def _unit(x, mask, n, eps, LAYER: tl.constexpr):
    """x (groups, n) fp32 over its root mean square, with LAYER over that of its distance from the mean."""
    if LAYER:
        x = tl.where(mask, x - (tl.sum(x, 1) / n)[:, None], 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 1) / n + eps)[:, None]


@triton.jit
def _update_norm_kernel(
    x_ptr, delta_ptr, second_ptr, after_ptr, y_ptr, weight_ptr, bias_ptr, post_weight_ptr, post_bias_ptr, delta_weight_ptr,
    second_weight_ptr, also_ptr, also_weight_ptr, also_bias_ptr, n, eps, post_eps, delta_eps, second_eps, scale,
    GROUPS: tl.constexpr, UPDATE: tl.constexpr, SECOND: tl.constexpr, AFTER: tl.constexpr, NORM: tl.constexpr,
    LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, POST: tl.constexpr, POST_LAYER: tl.constexpr,
    POST_WEIGHT: tl.constexpr, POST_BIAS: tl.constexpr, OWN: tl.constexpr, ALSO: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    group, value = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK)[None, :]
    offs, mask = group * n + value, (group < GROUPS) & (value < n)
    row = tl.program_id(0).to(tl.int64) * GROUPS * n
    launch_next(TRIGGER)
    weight, bias = _factors(weight_ptr, bias_ptr, offs, mask, NORM and WEIGHT, NORM and BIAS)
    post_weight, post_bias = _factors(post_weight_ptr, post_bias_ptr, offs, mask, POST and POST_WEIGHT, POST and POST_BIAS)
    delta_weight, _ = _factors(delta_weight_ptr, delta_weight_ptr, offs, mask, OWN, False)
    second_weight, _ = _factors(second_weight_ptr, second_weight_ptr, offs, mask, OWN, False)
    also_weight, also_bias = _factors(also_weight_ptr, also_bias_ptr, offs, mask, ALSO and WEIGHT, ALSO and BIAS)
    after = 1.0
    if AFTER:
        after = tl.load(after_ptr).to(tl.float32)
    wait(PDL)
    x = tl.load(x_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
    if UPDATE:
        delta = tl.load(delta_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
        if SECOND:
            second = tl.load(second_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
            if OWN:
                delta = _unit(delta, mask, n, delta_eps, False) * delta_weight
                second = _unit(second, mask, n, second_eps, False) * second_weight
            delta += second
        if POST:
            delta = _unit(delta, mask, n, post_eps, POST_LAYER) * post_weight + post_bias
        x = (x + scale * delta) * after
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row + offs, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if NORM:
        unit = _unit(x, mask, n, eps, LAYER)
        tl.store(y_ptr + row + offs, (unit * weight + bias).to(y_ptr.dtype.element_ty), mask=mask)
        if ALSO:
            tl.store(also_ptr + row + offs, (unit * also_weight + also_bias).to(also_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _beside_kernel(
    a_ptr, b_ptr, a_weight_ptr, b_weight_ptr, y_ptr, n, a_eps, b_eps, BLOCK: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    offs, row, second = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64), tl.program_id(1)
    mask = offs < n
    overlap(PDL, TRIGGER)
    x_ptr, weight_ptr, eps = a_ptr, a_weight_ptr, a_eps
    if second == 1:
        x_ptr, weight_ptr, eps = b_ptr, b_weight_ptr, b_eps
    x = tl.load(x_ptr + row * n + offs, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps) * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + (2 * row + second) * n + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def beside(a: torch.Tensor, b: torch.Tensor, a_norm: Norm | None = None, b_norm: Norm | None = None) -> torch.Tensor:
    """As `norms.beside`; RMSNorms with weights of one dtype in one kernel."""
    norms = (a_norm, b_norm)
    plain = all(n is not None and n.weight is not None and n.is_rms for n in norms)
    closed = a.is_contiguous() and b.is_contiguous() and a.shape == b.shape and a.dtype == b.dtype
    alike = plain and a_norm is not None and b_norm is not None and a_norm.weight.dtype == b_norm.weight.dtype  # type: ignore[union-attr]
    if not closed or not alike or a.shape[-1] > MOST:
        return definition.beside(a, b, a_norm, b_norm)
    assert a_norm is not None
    assert b_norm is not None
    M, K = a.shape
    y = torch.empty(M, 2 * K, dtype=a.dtype, device=a.device)
    BLOCK = triton.next_power_of_2(K)
    _beside_kernel[(M, 2)](
        a, b, a_norm.weight, b_norm.weight, y, K, a_norm.eps, b_norm.eps, BLOCK=BLOCK, num_warps=min(16, max(1, BLOCK // 256)),
        **pdl(a),
    )  # fmt: skip
    return y


def refuse(x: torch.Tensor, *norms: Norm | None) -> str | None:
    """Why the kernel does not take rows x (..., K) and those norms, or None."""
    K, there = x.shape[-1], [norm for norm in norms if norm is not None]
    if not x.is_contiguous() or K > MOST:
        return f"takes contiguous rows of up to {MOST} values"
    if any(t is not None and t.numel() != K for norm in there for t in (norm.weight, norm.bias)):
        return "takes factors that are equal for all rows"
    return "norms of different groups" if len({norm.groups for norm in there}) > 1 else None


def _form(norm: Norm) -> tuple[object, ...]:
    """What two norms of one stream must have in common."""
    weight, bias = norm.weight, norm.bias
    return norm.kind, norm.groups, norm.eps, None if weight is None else weight.dtype, None if bias is None else bias.dtype


NONE = Norm(None, 0.0)


def _launch(
    x: torch.Tensor, delta: torch.Tensor | None, y: torch.Tensor | None, norm: Norm | None, how: Addition,
    also: tuple[Norm, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    post, scale, after, second, own = how
    one, two, (of_delta, of_second), (other, z) = norm or NONE, post or NONE, own or (NONE, NONE), also or (NONE, None)
    K, groups = x.shape[-1], (norm or two).groups
    n = K // groups
    BLOCK, BLOCK_G = triton.next_power_of_2(n), triton.next_power_of_2(groups)
    _update_norm_kernel[(x.numel() // K,)](
        x, delta, second, after, y, one.weight, one.bias, two.weight, two.bias, of_delta.weight, of_second.weight, z,
        other.weight, other.bias, n, one.eps, two.eps, of_delta.eps, of_second.eps, scale, GROUPS=groups,
        UPDATE=delta is not None, SECOND=second is not None, AFTER=after is not None, NORM=norm is not None,
        LAYER=one.kind == "layer", WEIGHT=one.weight is not None, BIAS=one.bias is not None, POST=post is not None,
        POST_LAYER=two.kind == "layer", POST_WEIGHT=two.weight is not None, POST_BIAS=two.bias is not None,
        OWN=own is not None, ALSO=also is not None, BLOCK_G=BLOCK_G, BLOCK=BLOCK,
        num_warps=min(16, max(1, BLOCK * BLOCK_G // 256)), **pdl(x),
    )  # fmt: skip


def _closed(*deltas: torch.Tensor | None) -> bool:
    return all(t is None or t.is_contiguous() for t in deltas)


def _refuse(x: torch.Tensor, delta: torch.Tensor | None, how: Addition, *norms: Norm) -> bool:
    """Whether the kernel does not take an update with these norms; of delta and second it takes RMSNorms with a weight."""
    own, second = how.own or (), how.second
    plain = all(second is not None and n.weight is not None and n.is_rms for n in own)
    return not plain or not _closed(delta, second) or refuse(x, how.post, *own, *norms) is not None


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """As `norms.normed`."""
    if refuse(x, norm):
        return definition.normed(x, norm)
    y = torch.empty_like(x)
    _launch(x, None, y, norm, ALONE)
    return y


def add(x: torch.Tensor, delta: torch.Tensor, how: Addition = ALONE) -> None:
    """As `norms.add`."""
    if _refuse(x, delta, how):
        definition.add(x, delta, how)
    else:
        _launch(x, delta, None, None, how)


def update_norm(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, how: Addition = ALONE) -> torch.Tensor:
    """As `norms.update_norm`."""
    if _refuse(x, delta, how, norm):
        return definition.update_norm(x, delta, norm, how)
    y = torch.empty_like(x)
    _launch(x, delta, y, norm, how)
    return y


def update_norms(
    x: torch.Tensor, delta: torch.Tensor | None, norms: tuple[Norm, Norm], how: Addition = ALONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norms.update_norms`."""
    one, other = norms
    if _refuse(x, delta, how, one, other) or _form(one) != _form(other):
        return update_norm(x, delta, one, how), normed(x, other)
    y, z = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
    _launch(x, delta, y, one, how, (other, z))
    return y, z
