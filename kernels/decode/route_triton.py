"""triton/route: the experts of each token and their weights, as transformers' top-k routers compute them, in one kernel.

Maths   softmax over all experts of round(router . x), its top k, divided by their sum where the model does so
Grid    (cdiv(E, BLOCK_E), M): a program multiplies a few rows of the router; the last of a token to finish picks
Ties    the lowest expert id
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

from lowq_kernels.decode.launch import pdl
from lowq_kernels.decode.route import Routing, softmax_alone
from lowq_kernels.dispatch.registry import Config, register

FEW = 64  # tokens; for more a matrix product is the faster way
BLOCK_H = 2048


@triton.jit
def _route_kernel(
    x_ptr, router_ptr, bias_ptr, logits_ptr, count_ptr, ids_ptr, weights_ptr, H, E,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr, BIAS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, ALL_E: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
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
    for start in range(0, H, BLOCK_H):
        here = start + offs_h
        x = tl.load(x_ptr + row * H + here, mask=here < H, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
        ahead = here + BLOCK_H
        w = tl.load(rows + ahead[None, :], mask=(experts < E)[:, None] & (ahead < H)[None, :], other=0.0)
    logits = tl.sum(acc, 1)
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    logits = logits.to(dtype).to(tl.float32)
    tl.store(logits_ptr + row * ALL_E + experts, logits, mask=experts < E)
    tl.debug_barrier()  # every thread's logits are written before one of them says so
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(count_ptr + row, 0)
    offs = tl.arange(0, ALL_E)
    logit = tl.load(logits_ptr + row * ALL_E + offs, mask=offs < E, other=float("-inf"), cache_modifier=".cg")
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    # probability and id as one number: positive floats are ordered as their bits are; a lower id wins a tie
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (ALL_E - 1 - offs).to(tl.int64)
    key = tl.where(offs < E, key, -1)
    places = tl.arange(0, BLOCK_K)
    chosen, ids = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        ids = tl.where(places == k, ALL_E - 1 - (best & 0xFFFFFFFF), ids)
        chosen = tl.where(places == k, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), chosen)
        key = tl.where(key == best, -1, key)
    if NORMALISE:
        chosen = chosen / tl.sum(chosen, 0)
    if ROUND:
        chosen = chosen.to(dtype).to(tl.float32)
    tl.store(ids_ptr + row * TOP_K + places, ids, mask=places < TOP_K)
    tl.store(weights_ptr + row * TOP_K + places, chosen, mask=places < TOP_K)


@cache
def _scratch(device: torch.device, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and counters, kept for good: CUDA graphs hold their addresses, and launches on one stream share them."""
    return torch.empty(rows * width, device=device), torch.zeros(rows, dtype=torch.int32, device=device)


@register("triton/route", op="route", m_range=(1, FEW), rank=40, refuse=softmax_alone)
def route(r: Routing, config: Config) -> torch.Tensor:
    """As `RouteCall` says."""
    M, E, H, top_k = r.sizes
    ALL_E = triton.next_power_of_2(E)
    logits, count = _scratch(r.x.device, M, ALL_E)
    BLOCK_E = 2 if E >= 64 else 1
    _route_kernel[(triton.cdiv(E, BLOCK_E), M)](
        r.x, r.router, r.bias, logits, count, r.ids, r.weights, H, E, TOP_K=top_k, NORMALISE=r.normalise, ROUND=r.rounded,
        BIAS=r.bias is not None, BLOCK_K=triton.next_power_of_2(top_k), BLOCK_E=BLOCK_E,
        BLOCK_H=min(BLOCK_H, triton.next_power_of_2(H)), ALL_E=ALL_E,
        num_warps=4, **pdl(r.x),
    )  # fmt: skip
    return r.ids
