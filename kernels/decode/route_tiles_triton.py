"""triton/route_tiles and triton/route_many: routers of many tokens in two kernels, the logits and the choice of experts.

Logits  route_tiles, 9 to 128 tokens: grid (cdiv(E, BLOCK_E), cdiv(H, SPAN)); a program multiplies SPAN features of all tokens
        by those of BLOCK_E experts on tensor cores, so the router is read once, not once a token (triton/route)
        route_many: a matrix product of torch
Choice  a program a token adds the parts of its logits in their order (of a matrix product there is one) and selects experts
Facts   as in triton/route; route_tiles takes neither a norm nor a scale, which change x before it is multiplied
Launch  route_tiles reads the router's weights before the previous kernel has ended (gdc_wait)
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.decode import router
from lowq_kernels.decode.launch import launch_next, overlap, pdl, wait
from lowq_kernels.decode.route import FEW, RouteCall, Routing
from lowq_kernels.decode.route_triton import facts_of, select_experts
from lowq_kernels.dispatch.registry import ANY_M, FLOATS, Config, register

BLOCK_E = 32
SPANS = (128, 256, 512)  # features of a program: the fewest with which all programs run at once
FROM = 9  # min. tokens: fewer read the router from L2 about as fast as they wait for a second kernel
# Max. tokens. Beyond FEW all programs have to run at once: 128 tokens of 256 x 7168 take 11.1 us on an H200 in 112 programs,
# by a matrix product 13.7; of 384 x 7168 in 168 programs 15.2 and 12.6.
MOST = 128


@triton.jit
def _parts_kernel(
    x_ptr, router_ptr, parts_ptr, M, H, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    experts, rows = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    here = part * SPAN + tl.arange(0, SPAN)
    launch_next(TRIGGER)
    known, inside = experts < E, here < H
    w = tl.load(
        router_ptr + experts[None, :].to(tl.int64) * H + here[:, None], mask=known[None, :] & inside[:, None], other=0.0
    )
    wait(PDL)
    x = tl.load(x_ptr + rows[:, None].to(tl.int64) * H + here[None, :], mask=(rows < M)[:, None] & inside[None, :], other=0.0)
    sums = tl.dot(x, w)
    tl.store(parts_ptr + (part * M + rows[:, None]) * E + experts[None, :], sums, mask=(rows < M)[:, None] & known[None, :])


@triton.jit
def _choice_kernel(
    parts_ptr, bias_ptr, router_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr, sum_eps, factor, PARTS: tl.constexpr,
    BIAS: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, ROUND: tl.constexpr,
    BEYOND: tl.constexpr, SIGMOID: tl.constexpr, CHOICE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    overlap(PDL, TRIGGER)
    select_experts(
        parts_ptr + row * E, tl.num_programs(0) * E, bias_ptr, router_ptr, choice_ptr, each_ptr, x_ptr, ids_ptr, weights_ptr,
        row, sum_eps, factor, PARTS, BIAS, E, TOP_K, NORMALISE, ROUND, BEYOND, SIGMOID, CHOICE, GROUPS, KEPT, TOP2, EACH,
    )  # fmt: skip


def _choose(r: Routing, parts: torch.Tensor, PARTS: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Fill r's ids and weights; its logits are the sum of `parts` (PARTS, M, E) plus the bias."""
    f = r.facts
    _choice_kernel[(r.x.shape[0],)](
        parts, bias, f.weight, f.choice_bias, f.each, r.x, r.ids, r.weights, f.sum_eps, f.factor, PARTS=PARTS,
        BIAS=bias is not None, num_warps=1, **facts_of(r), **pdl(r.x),
    )  # fmt: skip
    return r.ids


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


@register("triton/route_tiles", op="route", m_range=(FROM, MOST), dtypes=FLOATS, rank=35, refuse=_refuse)
def route(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    (M, E, H, _), f = r.sizes, r.facts
    SPAN = _span(E, H, gpu.here(r.x.device.index).sms)
    PARTS = triton.cdiv(H, SPAN)
    parts = torch.empty(PARTS * M * E, dtype=torch.float32, device=r.x.device)
    _parts_kernel[(triton.cdiv(E, BLOCK_E), PARTS)](
        r.x, f.weight, parts, M, H, E=E, BLOCK_M=max(16, triton.next_power_of_2(M)), BLOCK_E=BLOCK_E, SPAN=SPAN, num_warps=4,
        **pdl(r.x),
    )  # fmt: skip
    return _choose(r, parts, PARTS, f.logits_bias)


@register("triton/route_many", op="route", m_range=(FEW + 1, ANY_M[1]), rank=50)
def route_many(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    return _choose(r, router.logits(r.x, r.facts), 1, None)
