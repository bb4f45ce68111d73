"""route: which kernel picks the experts of tokens (op "route"), and the definition as the last of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.decode import reference
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Config, Op, capability, register, select


@dataclass(frozen=True)
class RouteCall:
    """M tokens of H features, top_k of E experts each.

    Its kernels are launch(x, router, ids, weights, normalise, rounded, bias, config) -> ids, which fill ids (M, top_k) int64
    and weights (M, top_k) fp32 with what `reference.route` gives. x (M, H), router (E, H) and bias (E,) or None: contiguous, of
    one dtype.
    """

    op: ClassVar[Op] = "route"
    M: int
    E: int
    H: int
    top_k: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]


def route(
    x: torch.Tensor, router: torch.Tensor, top_k: int, normalise: bool, rounded: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.route`, by the kernel that dispatch chooses."""
    (M, H), E = x.shape, router.shape[0]
    spec, config = select(RouteCall(M, E, H, top_k, x.dtype, x.device.type, capability(x.device)))
    ids = torch.empty(M, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(M, top_k, dtype=torch.float32, device=x.device)
    return spec.launch(x, router, ids, weights, normalise, rounded, bias, config), weights


@register("torch/route", op="route", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)
def by_definition(
    x: torch.Tensor,
    router: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    normalise: bool,
    rounded: bool,
    bias: torch.Tensor | None,
    config: Config,
) -> torch.Tensor:
    """As `RouteCall` says."""
    found = reference.route(x, router, ids.shape[1], normalise, rounded, bias)
    weights.copy_(found[1])
    return ids.copy_(found[0])
