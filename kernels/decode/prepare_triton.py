"""prepare in one kernel: splits off gates, reorders heads, and applies norms, rotation and factors to q, k and v.

Grid    (M, groups of heads): a program makes one head of the output, of many rows GROUP heads, and of a gated query its gate
Norms   over all heads at once: each program sums the squares of all heads of its part again; they come from the L2 cache
Turn    the partner of each turned dim is read beside it: x * cos -+ partner * sin
Limits  norms over all heads: before the rotation, up to 16,384 values
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode import prepare as definition
from lowq_kernels.decode.launch import launch_next, pdl, wait
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import Prepared

# Heads, rows times heads of a row, from which on a program makes GROUP of them (H200): 1,054 rows of 48 heads of 128 take 12 us
# instead of 62, 32 rows 1.5 instead of 2.4; 64 rows of 20 heads of 256 would take 2.8 instead of 2.1.
MANY, GROUP = 1500, 8
MOST = 16384  # max. values of a norm over all heads: one block of a program
NONE, EACH, ALL = 0, 1, 2  # no norm; a norm over each head; a norm over all heads at once


@triton.jit
def pairs(offs, R: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Of dims the other one of each pair, whether it is the first of it, and the pair's place in the tables; R are turned."""
    if NEIGHBOURS:
        partner, first, angle = offs ^ 1, offs % 2 == 0, offs // 2
    else:
        first = offs < R // 2
        partner, angle = tl.where(first, offs + R // 2, offs - R // 2), tl.where(first, offs, offs - R // 2)
    return tl.where(offs < R, partner, offs), first, angle


@triton.jit
def statistics(x, there, n, eps, LAYER: tl.constexpr, AXIS: tl.constexpr = 0):
    """The mean (0 for an RMS norm) and 1 / sqrt(mean square) of the values of x where `there` is true: of all values (AXIS 0 of
    one axis), or of each row (AXIS 1 of two)."""
    mean = 0.0
    if LAYER:
        mean = tl.sum(x, AXIS, keep_dims=AXIS == 1) / n
    off = tl.where(there, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(off * off, AXIS, keep_dims=AXIS == 1) / n + eps)


@triton.jit
def normed(x, mean, inverse, weight_ptr, bias_ptr, at, mask, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    x = (x - mean) * inverse
    if WEIGHT:
        x = x * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x = x + tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _heads(
    from_ptr, step, all_ptr, to_ptr, weight_ptr, bias_ptr, cos, sin, first_head, eps, by, after,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ALL: tl.constexpr, GROUP: tl.constexpr,
    OVER: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, HEADWISE: tl.constexpr,
    LAST: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """GROUP of HEADS heads, from from_ptr on `step` values apart, times `by`, normed and turned by cos and sin (BLOCK_D,),
    times `after`, go side by side to to_ptr. all_ptr: the first of the HEADS."""
    offs, own = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, GROUP)[:, None]
    partner, first, _ = pairs(offs, R, NEIGHBOURS)
    mask, turns = (offs < D) & (first_head + own < HEADS), offs < R
    x = tl.load(from_ptr + own * step + offs, mask=mask, other=0.0).to(tl.float32) * by
    other = tl.load(from_ptr + own * step + partner, mask=mask, other=0.0).to(tl.float32) * by
    at = (first_head + own) * D if HEADWISE else own * 0  # of the norm's factors
    if OVER > 0 and not LAST:
        if OVER == 1:
            mean, inverse = statistics(x, mask, D, eps, LAYER, 1)
        else:
            offs_all = tl.arange(0, BLOCK_ALL)
            there = offs_all < HEADS * D
            whole = tl.load(all_ptr + offs_all, mask=there, other=0.0).to(tl.float32) * by
            mean, inverse = statistics(whole, there, HEADS * D, eps, LAYER, 0)
        x = normed(x, mean, inverse, weight_ptr, bias_ptr, at + offs, mask, WEIGHT, BIAS)
        other = normed(other, mean, inverse, weight_ptr, bias_ptr, at + partner, mask, WEIGHT, BIAS)
    if R:
        x = tl.where(turns, x * cos[None, :] + other * tl.where(first, -sin[None, :], sin[None, :]), x)
    if OVER > 0 and LAST:
        mean, inverse = statistics(x, mask, D, eps, LAYER, 1)
        x = normed(x, mean, inverse, weight_ptr, bias_ptr, at + offs, mask, WEIGHT, BIAS)
    tl.store(to_ptr + own * D + offs, (x * after).to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["wide"])
def _prepare_kernel(
    qkv_ptr, y_ptr, gate_ptr, pos_ptr, cos_ptr, sin_ptr, q_weight, q_bias, k_weight, k_bias, v_weight, v_bias,
    wide, q_eps, k_eps, v_eps, key_scale, beta, period, offset,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ALL: tl.constexpr,
    GROUP: tl.constexpr, BY_HEAD: tl.constexpr, GATED: tl.constexpr, V_IS_K: tl.constexpr, LAST: tl.constexpr,
    NEIGHBOURS: tl.constexpr, SCALED: tl.constexpr, Q_OVER: tl.constexpr, Q_LAYER: tl.constexpr, Q_WEIGHT: tl.constexpr,
    Q_BIAS: tl.constexpr, Q_HEADWISE: tl.constexpr, K_OVER: tl.constexpr, K_LAYER: tl.constexpr, K_WEIGHT: tl.constexpr,
    K_BIAS: tl.constexpr, K_HEADWISE: tl.constexpr, V_OVER: tl.constexpr, V_LAYER: tl.constexpr, V_WEIGHT: tl.constexpr,
    V_BIAS: tl.constexpr, V_HEADWISE: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """HKV 0: there are neither k nor v."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    launch_next(TRIGGER)
    pos = tl.load(pos_ptr + row)
    dims = tl.arange(0, BLOCK_D)
    cos, sin = dims * 0.0, dims * 0.0
    if R:  # positions and angles are read before the previous kernel has ended (launch.py)
        _, _, angle = pairs(dims, R, NEIGHBOURS)
        at = pos.to(tl.int64) * R + angle
        cos = tl.load(cos_ptr + at, mask=dims < R, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=dims < R, other=0.0).to(tl.float32)
    wait(PDL)
    token, out = qkv_ptr + row * wide, y_ptr + row * (HQ + 2 * HKV) * D
    EACH: tl.constexpr = 2 if GATED else 1
    Q_GROUPS: tl.constexpr = (HQ + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (HKV + GROUP - 1) // GROUP
    Q_STEP: tl.constexpr = (3 if BY_HEAD else EACH) * D
    KV_STEP: tl.constexpr = (3 if BY_HEAD else 1) * D
    keys = token + HQ * EACH * D
    if group < Q_GROUPS:
        h = group * GROUP
        after = 1.0
        if SCALED:
            after = 1.0 + beta * tl.log(1.0 + tl.floor((pos.to(tl.float32) + offset) / period))
        _heads(
            token + h * Q_STEP, Q_STEP, token, out + h * D, q_weight, q_bias, cos, sin, h, q_eps, 1.0, after, HQ, D, R, BLOCK_D,
            BLOCK_ALL, GROUP, Q_OVER, Q_LAYER, Q_WEIGHT, Q_BIAS, Q_HEADWISE, LAST, NEIGHBOURS,
        )  # fmt: skip
        if GATED:
            offs, own = dims[None, :], h + tl.arange(0, GROUP)[:, None]
            mask = (offs < D) & (own < HQ)
            gate = tl.load(token + own * Q_STEP + D + offs, mask=mask)
            tl.store(gate_ptr + (row * HQ + own) * D + offs, gate, mask=mask)
    elif group < Q_GROUPS + KV_GROUPS:
        h = (group - Q_GROUPS) * GROUP
        mine = token + D if BY_HEAD else keys
        _heads(
            mine + h * KV_STEP, KV_STEP, keys, out + (HQ + h) * D, k_weight, k_bias, cos, sin, h, k_eps, key_scale, 1.0, HKV, D,
            R, BLOCK_D, BLOCK_ALL, GROUP, K_OVER, K_LAYER, K_WEIGHT, K_BIAS, K_HEADWISE, LAST, NEIGHBOURS,
        )  # fmt: skip
    else:
        h = (group - Q_GROUPS - KV_GROUPS) * GROUP
        mine = token + 2 * D if BY_HEAD else keys + (0 if V_IS_K else HKV) * D
        _heads(
            mine + h * KV_STEP, KV_STEP, keys, out + (HQ + HKV + h) * D, v_weight, v_bias, cos, sin, h, v_eps, 1.0, 1.0, HKV, D,
            0, BLOCK_D, BLOCK_ALL, GROUP, V_OVER, V_LAYER, V_WEIGHT, V_BIAS, V_HEADWISE, False, NEIGHBOURS,
        )  # fmt: skip


def refuse(p: Prepared) -> str | None:
    """Why the kernel does not take the call, or None."""
    for norm, heads in ((p.q_norm, p.HQ), (p.k_norm, p.HKV)):
        if norm is None:
            continue
        if p.over == "all" and norm.groups not in (1, heads):
            return f"norms over {norm.groups} groups of {heads} heads"
        if p.over == "all" and norm.groups == 1 and (p.norm_last or p.order == "heads" or p.gated):
            return "norms over all heads that do not lie side by side, or after the rotation"
        if p.over == "all" and heads * p.D > MOST:
            return f"takes norms over up to {MOST} values"
        if p.over == "head" and norm.groups != 1:
            return "norms over parts of a head"
    return "norms of values over parts of a head" if p.v_norm is not None and p.v_norm.groups != 1 else None


def _facts(name: str, norm: Norm | None, p: Prepared, heads: int) -> tuple[tuple[torch.Tensor | None, ...], dict[str, object]]:
    """A norm's pointers, and its constants, whose names start with `name`."""
    if norm is None:
        return (None, None), {f"{name}_{fact}": 0 for fact in ("OVER", "LAYER", "WEIGHT", "BIAS", "HEADWISE")}
    over_all = name != "V" and p.over == "all" and norm.groups == 1
    factors = next((t for t in (norm.weight, norm.bias) if t is not None), None)
    facts = {"OVER": ALL if over_all else EACH, "LAYER": norm.kind == "layer", "WEIGHT": norm.weight is not None}
    facts |= {"BIAS": norm.bias is not None, "HEADWISE": factors is not None and heads > 1 and factors.numel() == heads * p.D}
    return (norm.weight, norm.bias), {f"{name}_{fact}": value for fact, value in facts.items()}


def prepare(
    qkv: torch.Tensor, p: Prepared, pos: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `prepare.prepare`."""
    if refuse(p):
        return definition.prepare(qkv, p, pos, cos, sin)
    qkv, HKV = qkv.contiguous(), p.HKV if p.writes else 0
    M, wide = qkv.shape
    y = qkv.new_empty(M, (p.HQ + 2 * HKV) * p.D)
    gate = qkv.new_empty(M, p.HQ * p.D) if p.gated else None
    norms = ((p.q_norm, "Q", p.HQ), (p.k_norm, "K", p.HKV), (p.v_norm, "V", p.HKV))
    pointers: list[torch.Tensor | None] = []
    facts: dict[str, object] = {}
    for norm, name, heads in norms:
        tensors, more = _facts(name, norm, p, heads)
        pointers += tensors
        facts |= more
    over_all = ALL in (facts["Q_OVER"], facts["K_OVER"])
    eps = [0.0 if norm is None else norm.eps for norm, _, _ in norms]
    scale = p.position_scale
    by = (0.0, 1.0, 0.0) if scale is None else (scale.beta, float(scale.period), float(scale.offset))
    turns = cos is not None and sin is not None
    group = GROUP if M * (p.HQ + 2 * HKV) >= MANY else 1
    _prepare_kernel[(M, triton.cdiv(p.HQ, group) + 2 * triton.cdiv(HKV, group))](
        qkv, y, gate, pos, cos, sin, *pointers, wide, *eps, p.key_scale, *by,
        HQ=p.HQ, HKV=HKV, D=p.D, R=cos.shape[1] if turns and cos is not None else 0, BLOCK_D=triton.next_power_of_2(p.D),
        BLOCK_ALL=triton.next_power_of_2(max(p.HQ, p.HKV) * p.D) if over_all else 1, GROUP=group, BY_HEAD=p.order == "heads",
        GATED=p.gated, V_IS_K=p.v_is_k, LAST=p.norm_last, NEIGHBOURS=p.pairing == "neighbours", SCALED=scale is not None,
        **facts, num_warps=4 if over_all or group > 1 else 1, **pdl(qkv),
    )  # fmt: skip
    return y, gate
