"""triton/route_tiles: routers of 9 to 128 tokens in two kernels: sums of tiles on tensor cores, then the choice.

Grid    (cdiv(E, BLOCK_E), cdiv(H, SPAN)): a program multiplies SPAN features of all tokens by those of BLOCK_E experts, so the
        router is read once, not once a token (triton/route); then a program a token adds the parts in their order and chooses
Facts   as in triton/route, but neither a norm nor a scale, which change x before it is multiplied
Launch  the router's weights are read before the previous kernel has ended (gdc_wait)
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels import gpu
from lowq_kernels.decode.launch import pdl
from lowq_kernels.decode.route import RouteCall, Routing
from lowq_kernels.decode.route_triton import FEW, facts_of, select_experts
from lowq_kernels.dispatch.registry import FLOATS, Config, register

BLOCK_E = 32
SPANS = (128, 256, 512)  # features of a program: the fewest with which all programs run at once
FROM = 9  # min. tokens: fewer read the router from L2 about as fast as they wait for a second kernel
# Max. tokens. Beyond FEW all programs have to run at once: 128 tokens of 256 x 7168 take 11.1 us on an H200 in 112 programs,
# by a matrix product 13.7; of 384 x 7168 in 168 programs 15.2 and 12.6.
MOST = 128


@triton.jit
def _parts_kernel(
    x_ptr, router_ptr, parts_ptr, M, E, H, ALL_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    SPAN: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    experts, rows = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    here = part * SPAN + tl.arange(0, SPAN)
    if TRIGGER:
        gdc_launch_dependents()
    known, inside = experts < E, here < H
    w = tl.load(
        router_ptr + experts[None, :].to(tl.int64) * H + here[:, None], mask=known[None, :] & inside[:, None], other=0.0
    )
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + rows[:, None].to(tl.int64) * H + here[None, :], mask=(rows < M)[:, None] & inside[None, :], other=0.0)
    sums = tl.dot(x, w)
    tl.store(parts_ptr + (part * BLOCK_M + rows[:, None]) * ALL_E + experts[None, :], sums, mask=known[None, :])


@triton.jit
def _choice_kernel(
    parts_ptr, bias_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, E, sum_eps, factor, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BIAS: tl.constexpr,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr, BLOCK_K: tl.constexpr, ALL_E: tl.constexpr,
    BEYOND: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, EACH: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    row, experts = tl.program_id(0).to(tl.int64), tl.arange(0, ALL_E)
    logits_ptr = parts_ptr + row * ALL_E
    if TRIGGER:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    logits = tl.zeros((ALL_E,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(logits_ptr + part * BLOCK_M * ALL_E + experts, mask=experts < E, other=0.0)
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    if not BEYOND:
        logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.debug_barrier()  # all threads have read the first part before one writes over it
    tl.store(logits_ptr + experts, logits, mask=experts < E)
    tl.debug_barrier()
    select_experts(
        logits_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, row, E, sum_eps, factor, TOP_K, NORMALISE,
        ROUND, BLOCK_K, ALL_E, BEYOND, SIGMOID, CHOICE, GROUPS, KEPT, TOP2, EACH, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip


def _span(E: int, H: int, sms: int) -> int:
    """Features of a program."""
    columns = triton.cdiv(E, BLOCK_E)
    return next((s for s in SPANS if columns * triton.cdiv(H, s) <= sms), SPANS[-1])


def _refuse(call: RouteCall) -> str | None:
    sms = gpu.of(call.capability).sms
    if call.M > FEW and triton.cdiv(call.E, BLOCK_E) * triton.cdiv(call.H, _span(call.E, call.H, sms)) > sms:
        return f"takes up to {FEW} tokens of a router of {call.E} x {call.H}"
    taken = {"sigmoid", "choice_bias", "groups", "sum_eps", "factor", "each"}
    if more := set(call.beyond) - taken:
        return f"takes no router with {', '.join(sorted(more))}"
    return None


@cache
def _scratch(device: torch.device, numbers: int) -> torch.Tensor:
    """Sums of parts. Never freed: CUDA graphs hold their addresses. Launches on one stream share them."""
    return torch.empty(numbers, device=device)


@register("triton/route_tiles", op="route", m_range=(FROM, MOST), dtypes=FLOATS, rank=35, refuse=_refuse)
def route(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    (M, E, H, _), f = r.sizes, r.facts
    columns, BLOCK_M, facts = triton.cdiv(E, BLOCK_E), max(16, triton.next_power_of_2(M)), facts_of(f, E)
    SPAN = _span(E, H, gpu.here(r.x.device.index).sms)
    PARTS = triton.cdiv(H, SPAN)
    parts = _scratch(r.x.device, PARTS * BLOCK_M * facts["ALL_E"])
    _parts_kernel[(columns, PARTS)](
        r.x,
        f.weight,
        parts,
        M,
        E,
        H,
        ALL_E=facts["ALL_E"],
        BLOCK_M=BLOCK_M,
        BLOCK_E=BLOCK_E,
        SPAN=SPAN,
        num_warps=4,
        **pdl(r.x),
    )
    _choice_kernel[(M,)](
        parts, f.logits_bias, f.choice_bias, f.each, r.x, r.ids, r.weights, E, f.sum_eps, f.factor, PARTS=PARTS,
        BLOCK_M=BLOCK_M, BIAS=f.logits_bias is not None, num_warps=1, **facts, **pdl(r.x),
    )  # fmt: skip
    return r.ids
