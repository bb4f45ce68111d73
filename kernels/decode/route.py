"""route: which kernel picks the experts of tokens (op "route"), and the definition as the last of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.decode import reference
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Config, Op, capability, register, select


@dataclass(frozen=True)
class RouteCall:
    """M tokens of H features, top_k of E experts each. Its kernels are launch(routing, config) -> ids, see `Routing`."""

    op: ClassVar[Op] = "route"
    M: int
    E: int
    H: int
    top_k: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Routing:
    """Operands of a router, and the tensors that its kernels fill with what `reference.route` gives.

    x (M, H), router (E, H) and bias (E,) or None: contiguous, of one dtype. ids (M, top_k) int64, weights (M, top_k) fp32.
    """

    x: torch.Tensor
    router: torch.Tensor
    normalise: bool
    rounded: bool
    bias: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor, router: torch.Tensor, top_k: int, normalise: bool, rounded: bool, bias: torch.Tensor | None = None
    ) -> "Routing":
        """What `reference.route` takes, with tensors to be filled."""
        ids = torch.empty(x.shape[0], top_k, dtype=torch.int64, device=x.device)
        return cls(x, router, normalise, rounded, bias, ids, torch.empty(ids.shape, dtype=torch.float32, device=x.device))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, E, H, top_k."""
        return self.x.shape[0], self.router.shape[0], self.x.shape[1], self.ids.shape[1]


def route(
    x: torch.Tensor, router: torch.Tensor, top_k: int, normalise: bool, rounded: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.route`, by the kernel that dispatch chooses."""
    r = Routing.of(x, router, top_k, normalise, rounded, bias)
    spec, config = select(RouteCall(*r.sizes, x.dtype, x.device.type, capability(x.device)))
    return spec.launch(r, config), r.weights


@register("torch/route", op="route", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)
def by_definition(r: Routing, config: Config) -> torch.Tensor:
    """As `RouteCall` says."""
    ids, weights = reference.route(r.x, r.router, r.ids.shape[1], r.normalise, r.rounded, r.bias)
    r.weights.copy_(weights)
    return r.ids.copy_(ids)
