"""cuda/route: route.cu, a mixture's router in one launch of clusters, on Hopper and later.

Microseconds that it adds to a step on an H200 (in parentheses Triton): 128 experts of 2,048 features 2.3 (4.0), 32 experts of
2,880 features 1.8 (3.3).
"""

import ctypes
import math
import struct
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import UNFOLDED, Folded, Kernel
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode import launch
from lowq_kernels.decode.route import FEW, RouteCall, Routing
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.dispatch.registry import Config, register

FACTS = struct.Struct("@3Q2i4f")  # route.cu's Facts
PARAMETERS = (*(ctypes.c_void_p,) * 5, *(ctypes.c_int32,) * 6, Folded)  # Folded: of as many bytes as Facts, and more
TAKES = {"sigmoid", "choice_bias", "sum_eps", "factor", "norm", "scale", "each"}
CLUSTER, WARPS, TOKENS = 8, 16, 8  # blocks per cluster, warps per block, tokens per cluster
TILE, SPAN = 16, 32  # experts per row tile; k per warp and step
MOST_TOKENS = 512
# Max. 16-byte loads of the router's weight per lane: 80 of its 128 registers; of routers beyond a softmax 64, with a norm 48.
MOST_LOADS = {0: 20, 1: 16, 2: 12}
# Max. such loads per lane that wait in shared memory: 160 of a block's 227 KB. Sums and scales of x (with a norm) take 40.
MOST_AWAY = 20
LOAD = 16 * 32 * WARPS  # bytes of a block's loads


def _shape(E: int, H: int) -> tuple[int, int, int]:
    """Row tiles per block, blocks that share a row of k, and loads per row and warp."""
    tiles = math.ceil(E / TILE)
    parts = 1 if tiles > CLUSTER // 2 else CLUSTER // (1 << (tiles - 1).bit_length())
    return math.ceil(tiles / CLUSTER), parts, math.ceil(H / (SPAN * WARPS * parts))


def _beyond(facts: tuple[str, ...]) -> int:
    """The device code's template argument BEYOND."""
    return 2 if "norm" in facts else int(bool(facts))


def _away(tiles: int, steps: int, beyond: int) -> int:
    """Steps of the router that wait in shared memory."""
    return max(0, steps - MOST_LOADS[beyond] // (2 * tiles))


def _refuse(call: RouteCall) -> str | None:
    if more := set(call.beyond) - TAKES:
        return f"takes no router with {', '.join(more)}"
    if "scale" in call.beyond and "norm" not in call.beyond:
        return "takes no scale without a norm"
    tiles, _, steps = _shape(call.E, call.H)
    if call.H % 8 or call.top_k > 32:
        return f"takes features in eights and up to 32 experts a token, not {call.H} and {call.top_k}"
    if 2 * tiles * _away(tiles, steps, _beyond(call.beyond)) > MOST_AWAY:
        return f"a router of {call.E} x {call.H} is more than a cluster holds"
    return None


@cache
def _kernel(instance: str, device: int, smem: int, serialize: bool) -> Kernel:
    return Kernel("route.cu", instance, device, 32 * WARPS, PARAMETERS, smem=smem, cluster=CLUSTER, serialize=serialize)


def _facts(f: RouterFacts, H: int) -> bytes:
    """The kernel's argument."""
    tensors = (f.choice_bias, f.each, f.scale)
    wide = sum(1 << i for i, t in enumerate(tensors) if t is not None and t.dtype == torch.float32)
    pointers = (0 if t is None else t.data_ptr() for t in tensors)
    eps = 0.0 if f.norm is None else f.norm.eps
    return FACTS.pack(*pointers, wide, f.score == "sigmoid", eps, H**-0.5, f.sum_eps, f.factor)


CLUSTERS = gpu.since(lambda g: g.max_cluster >= CLUSTER)


def _prefer(call: RouteCall) -> bool:
    return call.M <= FEW or _shape(call.E, call.H)[0] == 1


@register(
    "cuda/route", op="route", min_capability=CLUSTERS, m_range=(1, MOST_TOKENS), rank=30, refuse=_refuse, prefer=_prefer
)  # fmt: skip
def route(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    (M, E, H, top_k), f = r.sizes, r.facts
    beyond, (tiles, parts, steps) = _beyond(f.beyond), _shape(E, H)
    away = _away(tiles, steps, beyond)
    more = (beyond, away) if away else (beyond,) if beyond else ()
    instance = f"route<{', '.join(map(str, (TYPES[r.x.dtype], tiles, parts, steps, *more)))}>"
    smem = 2 * tiles * away * LOAD
    kernel = _kernel(instance, r.x.device.index, smem, launch.enabled)
    pointers = (0 if t is None else t.data_ptr() for t in (f.weight, f.logits_bias, r.x, r.ids, r.weights))
    facts = _facts(f, H) if beyond else UNFOLDED
    kernel(CLUSTER, math.ceil(M / TOKENS), smem, *pointers, M, E, H, top_k, f.normalise, f.rounded, facts)
    return r.ids
