"""triton/route: the experts of each token and their weights in one kernel, for the routers of all families.

Maths   softmax over all experts of round(router . x), its top k, divided by their sum where the model does so
Grid    (cdiv(E, BLOCK_E), M): a program multiplies a few rows of the router; a token's last program to finish selects experts
Facts   those beyond a softmax (`RouterFacts`) are compiled in where a router has them; its logits are then not rounded, and
        its norm, an RMSNorm, becomes a factor of the sums: sum(w x) / rms(x). E is compiled in, too: groups of a power of two
        then need no masks (the choice of DeepSeek V3's experts is 1,879 lines of PTX instead of 3,170)
Ties    the lowest expert id
Many    for more tokens the logits are computed first, and a program a token selects experts (route_tiles_triton.py)
Launch  the router's weights are read before the previous kernel has ended (gdc_wait); counters start and end at zero
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.launch import launch_next, pdl, wait
from lowq_kernels.decode.route import FEW, Routing, by_definition
from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.lasting import lasting

BLOCK_H = 2048


@triton.jit
def _logits(
    parts_ptr, stride, bias_ptr, router_ptr, experts, known, PARTS: tl.constexpr, BIAS: tl.constexpr, BEYOND: tl.constexpr,
):  # fmt: skip
    """A token's logits, -inf where not `known`: the sum of its parts in their order, plus the bias."""
    logits = tl.load(parts_ptr + experts, mask=known, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(parts_ptr + part * stride + experts, mask=known, other=0.0, cache_modifier=".cg")
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=known, other=0.0).to(tl.float32)
    if not BEYOND:
        logits = logits.to(router_ptr.dtype.element_ty).to(tl.float32)
    return logits


@triton.jit
def _by_softmax(logits, experts, known, places, E: tl.constexpr, TOP_K: tl.constexpr):
    """Ids and probabilities of the TOP_K largest logits."""
    p = tl.exp(logits - tl.max(logits, 0))
    p = p / tl.sum(p, 0)
    # probability and id in one number: positive floats are ordered like their bits; a lower id wins a tie
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (E - experts).to(tl.int64)
    key = tl.where(known, key, -1)
    chosen, ids = tl.zeros(places.shape, tl.float32), tl.zeros(places.shape, tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        ids = tl.where(places == k, E - (best & 0xFFFFFFFF), ids)
        chosen = tl.where(places == k, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), chosen)
        key = tl.where(key == best, -1, key)
    return ids, chosen


@triton.jit
def _ordered(x, after, E: tl.constexpr):
    """int64 keys in the order of fp32 numbers of any sign; among equal numbers the key of the lower `after` is larger."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (E - after).to(tl.int64)


@triton.jit
def _by_facts(
    logits, experts, known, group, choice_ptr, places, E: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """Ids and scores of the TOP_K experts with the largest score + choice bias, within the KEPT best rows, which are groups."""
    LEAST: tl.constexpr = -(1 << 63)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        score = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    key = score
    if CHOICE:
        key = score + tl.load(choice_ptr + experts, mask=known, other=0.0).to(tl.float32)
    order = tl.where(known, _ordered(key, experts, E), LEAST)
    if KEPT < GROUPS:
        first = tl.max(order, 1)
        best = tl.max(tl.where(order == first[:, None], key, float("-inf")), 1)
        if TOP2:
            rest = tl.where(known & (order != first[:, None]), key, float("-inf"))
            best = best + tl.max(rest, 1)
        of_group = tl.where(group < GROUPS, _ordered(best, group, E), LEAST)
        kept = group < 0
        for _ in tl.static_range(KEPT):
            top = tl.max(of_group, 0)
            kept = kept | (of_group == top)
            of_group = tl.where(of_group == top, LEAST, of_group)
        order = tl.where(kept[:, None], order, LEAST)
    chosen, ids = tl.zeros(places.shape, tl.float32), tl.zeros(places.shape, tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(order, 1), 0)
        taken = order == best
        ids = tl.where(places == k, E - (best & 0xFFFFFFFF), ids)
        chosen = tl.where(places == k, tl.sum(tl.sum(tl.where(taken, score, 0.0), 1), 0), chosen)
        order = tl.where(taken, LEAST, order)
    return ids, chosen


@triton.jit
def select_experts(
    parts_ptr, stride, bias_ptr, router_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, row, sum_eps, factor,
    PARTS: tl.constexpr, BIAS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr,
    BEYOND: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write ids and weights of a token; parts of its E logits are `stride` apart. router_ptr and x_ptr only name dtypes."""
    places = tl.arange(0, triton.next_power_of_2(TOP_K))
    if BEYOND:
        MEMBERS: tl.constexpr = E // GROUPS
        group, member = tl.arange(0, triton.next_power_of_2(GROUPS)), tl.arange(0, triton.next_power_of_2(MEMBERS))
        experts, known = group[:, None] * MEMBERS + member[None, :], (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
        logits = _logits(parts_ptr, stride, bias_ptr, router_ptr, experts, known, PARTS, BIAS, BEYOND)
        ids, chosen = _by_facts(
            logits, experts, known, group, choice_ptr, places, E, TOP_K, SIGMOID, CHOICE, GROUPS, KEPT, TOP2,
        )  # fmt: skip
        if NORMALISE:
            chosen = chosen / (tl.sum(chosen, 0) + sum_eps)
        chosen = chosen * factor
        if EACH:
            chosen = chosen * tl.load(each_ptr + ids, mask=places < TOP_K, other=0.0).to(tl.float32)
    else:
        experts = tl.arange(0, triton.next_power_of_2(E))
        logits = _logits(parts_ptr, stride, bias_ptr, router_ptr, experts, experts < E, PARTS, BIAS, BEYOND)
        ids, chosen = _by_softmax(logits, experts, experts < E, places, E, TOP_K)
        if NORMALISE:
            chosen = chosen / tl.sum(chosen, 0)
    if ROUND:
        chosen = chosen.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(ids_ptr + row * TOP_K + places, ids, mask=places < TOP_K)
    tl.store(weights_ptr + row * TOP_K + places, chosen, mask=places < TOP_K)


@triton.jit
def _route_kernel(
    x_ptr, router_ptr, bias_ptr, sums_ptr, count_ptr, ids_ptr, weights_ptr, choice_ptr, each_ptr, norm_ptr, scale_ptr, H, eps,
    root, sum_eps, factor, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, NORM: tl.constexpr, NORM_WEIGHT: tl.constexpr,
    SCALE: tl.constexpr, BIAS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr,
    BEYOND: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    experts, offs_h = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_H)
    launch_next(TRIGGER)
    rows = router_ptr + experts[:, None].to(tl.int64) * H
    w = tl.load(rows + offs_h[None, :], mask=(experts < E)[:, None] & (offs_h < H)[None, :], other=0.0)
    wait(PDL)
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
    tl.store(sums_ptr + row * E + experts, logits, mask=experts < E)
    tl.debug_barrier()  # all threads write their sums before one of them announces it
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(count_ptr + row, 0)
    select_experts(
        sums_ptr + row * E, 0, bias_ptr, router_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, row, sum_eps, factor,
        1, BIAS, E, TOP_K, NORMALISE, ROUND, BEYOND, SIGMOID, CHOICE, GROUPS, KEPT, TOP2, EACH,
    )  # fmt: skip


@lasting
def _scratch(device: torch.device, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and counters. Never freed: CUDA graphs hold their addresses. Launches on one stream share them.

    A launch outside of a graph took the host 36 us so on an H200, instead of 41 with `counters` and a new tensor of sums.
    """
    return torch.empty(rows * width, device=device), torch.zeros(rows, dtype=torch.int32, device=device)


@register("triton/route", op="route", m_range=(1, FEW), rank=40)
def route(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    (M, E, H, _), f = r.sizes, r.facts
    if f.norm is not None and not f.norm.is_rms:
        return by_definition(r, config)
    sums, count = _scratch(r.x.device, M, E)
    BLOCK_E = 2 if E >= 64 else 1
    norm_weight = None if f.norm is None else f.norm.weight
    _route_kernel[(triton.cdiv(E, BLOCK_E), M)](
        r.x, f.weight, f.logits_bias, sums, count, r.ids, r.weights, f.choice_bias, f.each, norm_weight, f.scale, H,
        0.0 if f.norm is None else f.norm.eps, H**-0.5, f.sum_eps, f.factor, BLOCK_E=BLOCK_E,
        BLOCK_H=min(BLOCK_H, triton.next_power_of_2(H)), NORM=f.norm is not None, NORM_WEIGHT=norm_weight is not None,
        SCALE=f.scale is not None, BIAS=f.logits_bias is not None, num_warps=4, **facts_of(r), **pdl(r.x),
    )  # fmt: skip
    return r.ids


def facts_of(r: Routing) -> dict[str, object]:
    """The constants of `select_experts`, but for PARTS and BIAS."""
    f = r.facts
    groups, kept = f.groups if f.groups[0] != f.groups[1] else (1, 1)
    return {
        "E": f.weight.shape[0], "TOP_K": f.top_k, "NORMALISE": f.normalise, "ROUND": f.rounded, "BEYOND": bool(f.beyond),
        "SIGMOID": f.score == "sigmoid", "CHOICE": f.choice_bias is not None, "GROUPS": groups, "KEPT": kept,
        "TOP2": f.group_score == "top2", "EACH": f.each is not None,
    }  # fmt: skip
