"""triton/route: the experts of each token and their weights in one kernel, for the routers of all families.

Maths   softmax over all experts of round(router . x), its top k, divided by their sum where the model does so
Grid    (cdiv(E, BLOCK_E), M): a program multiplies a few rows of the router; a token's last program to finish selects experts
Facts   those beyond a softmax (`RouterFacts`) are compiled in where a router has them; its logits are then not rounded, and
        its norm, an RMSNorm, becomes a factor of the sums: sum(w x) / rms(x)
Ties    the lowest expert id
Many    for more tokens the logits are a matrix product, and a program a token selects experts (triton/route_many)
Launch  the router's weights are read before the previous kernel has ended (gdc_wait); counters start and end at zero
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels.decode import router
from lowq_kernels.decode.launch import pdl
from lowq_kernels.decode.route import Routing, by_definition
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.dispatch.registry import ANY_M, Config, register

FEW = 64  # max. tokens; for more a matrix product is faster
BLOCK_H = 2048


@triton.jit
def _by_softmax(logits_ptr, E, places, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, ALL_E: tl.constexpr):
    """Ids and probabilities of the TOP_K largest of E logits."""
    offs = tl.arange(0, ALL_E)
    logit = tl.load(logits_ptr + offs, mask=offs < E, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    # probability and id in one number: positive floats are ordered like their bits; a lower id wins a tie
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (ALL_E - 1 - offs).to(tl.int64)
    key = tl.where(offs < E, key, -1)
    chosen, ids = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        ids = tl.where(places == k, ALL_E - 1 - (best & 0xFFFFFFFF), ids)
        chosen = tl.where(places == k, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), chosen)
        key = tl.where(key == best, -1, key)
    return ids, chosen


@triton.jit
def _ordered(x, after, LAST: tl.constexpr):
    """int64 keys in the order of fp32 numbers of any sign; among equal numbers the key of the lower `after` is larger."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (LAST - after).to(tl.int64)


@triton.jit
def _by_facts(
    logits_ptr, choice_ptr, E, places, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
):  # fmt: skip
    """Ids and scores of the TOP_K experts with the largest score + choice bias, within the KEPT best groups."""
    LEAST: tl.constexpr = -(1 << 63)
    LAST: tl.constexpr = BLOCK_GROUPS * BLOCK_MEMBERS
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_MEMBERS)
    each = E // GROUPS
    expert = group[:, None] * each + member[None, :]
    there = (group < GROUPS)[:, None] & (member < each)[None, :]
    logit = tl.load(logits_ptr + expert, mask=there, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    key = score
    if CHOICE:
        key = score + tl.load(choice_ptr + expert, mask=there, other=0.0).to(tl.float32)
    order = tl.where(there, _ordered(key, expert, LAST), LEAST)
    if KEPT < GROUPS:
        first = tl.max(order, 1)
        best = tl.max(tl.where(order == first[:, None], key, float("-inf")), 1)
        if TOP2:
            rest = tl.where(there & (order != first[:, None]), key, float("-inf"))
            best = best + tl.max(rest, 1)
        of_group = tl.where(group < GROUPS, _ordered(best, group, LAST), LEAST)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            top = tl.max(of_group, 0)
            kept = kept | (of_group == top)
            of_group = tl.where(of_group == top, LEAST, of_group)
        order = tl.where(kept[:, None], order, LEAST)
    chosen, ids = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(order, 1), 0)
        taken = order == best
        ids = tl.where(places == k, LAST - (best & 0xFFFFFFFF), ids)
        chosen = tl.where(places == k, tl.sum(tl.sum(tl.where(taken, score, 0.0), 1), 0), chosen)
        order = tl.where(taken, LEAST, order)
    return ids, chosen


@triton.jit
def select_experts(
    logits_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, row, E, sum_eps, factor,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr, BLOCK_K: tl.constexpr, ALL_E: tl.constexpr,
    BEYOND: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, EACH: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write ids and weights of a token whose E logits are at logits_ptr."""
    places = tl.arange(0, BLOCK_K)
    if BEYOND:
        ids, chosen = _by_facts(
            logits_ptr, choice_ptr, E, places, TOP_K, BLOCK_K, SIGMOID, CHOICE, GROUPS, KEPT, TOP2, BLOCK_GROUPS, BLOCK_MEMBERS,
        )  # fmt: skip
        if NORMALISE:
            chosen = chosen / (tl.sum(chosen, 0) + sum_eps)
        chosen = chosen * factor
        if EACH:
            chosen = chosen * tl.load(each_ptr + ids, mask=places < TOP_K, other=0.0).to(tl.float32)
    else:
        ids, chosen = _by_softmax(logits_ptr, E, places, TOP_K, BLOCK_K, ALL_E)
        if NORMALISE:
            chosen = chosen / tl.sum(chosen, 0)
    if ROUND:
        chosen = chosen.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(ids_ptr + row * TOP_K + places, ids, mask=places < TOP_K)
    tl.store(weights_ptr + row * TOP_K + places, chosen, mask=places < TOP_K)


@triton.jit
def _route_kernel(
    x_ptr, router_ptr, bias_ptr, logits_ptr, count_ptr, ids_ptr, weights_ptr, choice_ptr, each_ptr, norm_ptr, scale_ptr, H, E,
    eps, root, sum_eps, factor,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr, BIAS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, ALL_E: tl.constexpr, BEYOND: tl.constexpr, SIGMOID: tl.constexpr,
    CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr, EACH: tl.constexpr,
    NORM: tl.constexpr, NORM_WEIGHT: tl.constexpr, SCALE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    experts, offs_h = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_H)
    dtype = x_ptr.dtype.element_ty
    if TRIGGER:
        gdc_launch_dependents()
    rows = router_ptr + experts[:, None].to(tl.int64) * H
    w = tl.load(rows + offs_h[None, :], mask=(experts < E)[:, None] & (offs_h < H)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    squares = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, H, BLOCK_H):
        here = start + offs_h
        x = tl.load(x_ptr + row * H + here, mask=here < H, other=0.0)
        x = x.to(tl.float32)
        if NORM:
            squares += x * x
        if NORM_WEIGHT:
            x = x * tl.load(norm_ptr + here, mask=here < H, other=0.0).to(tl.float32)
        if SCALE:
            x = x * tl.load(scale_ptr + here, mask=here < H, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        ahead = here + BLOCK_H
        w = tl.load(rows + ahead[None, :], mask=(experts < E)[:, None] & (ahead < H)[None, :], other=0.0)
    logits = tl.sum(acc, 1)
    if NORM:
        logits = logits * tl.rsqrt(tl.sum(squares, 0) / H + eps)
    if SCALE:
        logits = logits * root
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    if not BEYOND:
        logits = logits.to(dtype).to(tl.float32)
    tl.store(logits_ptr + row * ALL_E + experts, logits, mask=experts < E)
    tl.debug_barrier()  # all threads write their logits before one of them announces it
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(count_ptr + row, 0)
    select_experts(
        logits_ptr + row * ALL_E, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, row, E, sum_eps, factor, TOP_K, NORMALISE,
        ROUND, BLOCK_K, ALL_E, BEYOND, SIGMOID, CHOICE, GROUPS, KEPT, TOP2, EACH, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip


@triton.jit
def _select_kernel(
    logits_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, E, sum_eps, factor,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr, BLOCK_K: tl.constexpr, ALL_E: tl.constexpr,
    BEYOND: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, EACH: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if TRIGGER:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    select_experts(
        logits_ptr + row * E, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, row, E, sum_eps, factor, TOP_K, NORMALISE,
        ROUND, BLOCK_K, ALL_E, BEYOND, SIGMOID, CHOICE, GROUPS, KEPT, TOP2, EACH, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip


@cache
def _scratch(device: torch.device, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and counters. Never freed: CUDA graphs hold their addresses. Launches on one stream share them."""
    return torch.empty(rows * width, device=device), torch.zeros(rows, dtype=torch.int32, device=device)


@register("triton/route", op="route", m_range=(1, FEW), rank=40)
def route(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    M, E, H, _ = r.sizes
    ALL_E, f = triton.next_power_of_2(E), r.facts
    if f.norm is not None and not f.norm.is_rms:
        return by_definition(r, config)
    logits, count = _scratch(r.x.device, M, ALL_E)
    BLOCK_E = 2 if E >= 64 else 1
    norm_weight = None if f.norm is None else f.norm.weight
    _route_kernel[(triton.cdiv(E, BLOCK_E), M)](
        r.x, f.weight, f.logits_bias, logits, count, r.ids, r.weights, f.choice_bias, f.each, norm_weight, f.scale, H, E,
        0.0 if f.norm is None else f.norm.eps, H**-0.5, f.sum_eps, f.factor, BIAS=f.logits_bias is not None,
        BLOCK_E=BLOCK_E, BLOCK_H=min(BLOCK_H, triton.next_power_of_2(H)), NORM=f.norm is not None,
        NORM_WEIGHT=norm_weight is not None, SCALE=f.scale is not None, num_warps=4, **facts_of(f, E), **pdl(r.x),
    )  # fmt: skip
    return r.ids


def facts_of(f: RouterFacts, E: int) -> dict[str, object]:
    """The constants of `select_experts`."""
    groups, best = f.groups if f.groups[0] != f.groups[1] else (1, 1)
    return {
        "TOP_K": f.top_k, "NORMALISE": f.normalise, "ROUND": f.rounded, "BLOCK_K": triton.next_power_of_2(f.top_k),
        "ALL_E": triton.next_power_of_2(E), "BEYOND": bool(f.beyond), "SIGMOID": f.score == "sigmoid",
        "CHOICE": f.choice_bias is not None, "GROUPS": groups, "KEPT": best, "TOP2": f.group_score == "top2",
        "EACH": f.each is not None, "BLOCK_GROUPS": triton.next_power_of_2(groups),
        "BLOCK_MEMBERS": triton.next_power_of_2(E // groups),
    }  # fmt: skip


@register("triton/route_many", op="route", m_range=(FEW + 1, ANY_M[1]), rank=50)
def route_many(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    M, E, _, _ = r.sizes
    f = r.facts
    logits = router.logits(r.x, f)
    _select_kernel[(M,)](
        logits, f.choice_bias, f.each, r.x, r.ids, r.weights, E, f.sum_eps, f.factor, num_warps=1, **facts_of(f, E), **pdl(r.x)
    )
    return r.ids
