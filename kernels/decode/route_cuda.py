"""cuda/route: route.cu, a mixture's router in one launch of clusters, on Hopper and later.

Microseconds that it adds to a step on an H200 (in parentheses Triton): 128 experts of 2,048 features 2.3 (4.0), 32 experts of
2,880 features 1.8 (3.3).
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode import launch
from lowq_kernels.decode.route import RouteCall, Routing, softmax_alone
from lowq_kernels.dispatch.registry import Config, register

PARAMETERS = (*(ctypes.c_void_p,) * 5, *(ctypes.c_int32,) * 6)
CLUSTER, WARPS, TOKENS = 8, 16, 8  # blocks per cluster, warps per block, tokens per cluster
TILE, SPAN = 16, 32  # experts per row tile; k per warp and step
MOST_TOKENS = 512
MOST_LOADS = 20  # max. 16-byte loads of the router's weight per lane: 80 of its 128 registers


def _shape(E: int, H: int) -> tuple[int, int, int]:
    """Row tiles per block, blocks that share a row of k, and loads per row and warp."""
    tiles = math.ceil(E / TILE)
    parts = 1 if tiles > CLUSTER // 2 else CLUSTER // (1 << (tiles - 1).bit_length())
    return math.ceil(tiles / CLUSTER), parts, math.ceil(H / (SPAN * WARPS * parts))


def _refuse(call: RouteCall) -> str | None:
    if why := softmax_alone(call):
        return why
    tiles, _, steps = _shape(call.E, call.H)
    if call.H % 8 or call.top_k > 32:
        return f"takes features in eights and up to 32 experts a token, not {call.H} and {call.top_k}"
    if 2 * tiles * steps > MOST_LOADS:
        return f"a router of {call.E} x {call.H} is more than a cluster's registers hold"
    return None


@cache
def _kernel(instance: str, device: int, serialize: bool) -> Kernel:
    return Kernel("route.cu", instance, device, 32 * WARPS, PARAMETERS, cluster=CLUSTER, serialize=serialize)


CLUSTERS = gpu.since(lambda g: g.max_cluster >= CLUSTER)


@register("cuda/route", op="route", min_capability=CLUSTERS, m_range=(1, MOST_TOKENS), rank=30, refuse=_refuse)
def route(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    M, E, H, top_k = r.sizes
    instance = f"route<{TYPES[r.x.dtype]}, {', '.join(map(str, _shape(E, H)))}>"
    kernel = _kernel(instance, r.x.device.index, launch.enabled)
    f = r.facts
    pointers = (0 if t is None else t.data_ptr() for t in (f.weight, f.logits_bias, r.x, r.ids, r.weights))
    kernel(CLUSTER, math.ceil(M / TOKENS), 0, *pointers, M, E, H, top_k, f.normalise, f.rounded)
    return r.ids
