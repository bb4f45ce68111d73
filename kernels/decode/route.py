"""Operation "route": the experts of tokens. The torch definition is its last kernel."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.decode import router
from lowq_kernels.decode.router import RouterFacts
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Config, Op, capability, register, select

# Max. tokens of kernels that read a router once per token (triton/route) or, if it is large, once per eight (cuda/route). On an
# H200, us, 64 tokens of 256 x 3072: cuda/route 5.7, triton/route_tiles 5.8; 128 tokens: 11.4, 6.4. More tokens than this go by
# triton/route_tiles where all its programs run at once, else by triton/route_many.
FEW = 64
MIXED = "weights of another dtype than x"  # transformers keeps some routers in fp32 (Ernie 4.5)


@dataclass(frozen=True)
class RouteCall:
    """M tokens of H features, top_k of E experts each. beyond: see `RouterFacts.beyond`, and MIXED.

    Its kernels are launch(routing, config) -> ids, see `Routing`.
    """

    op: ClassVar[Op] = "route"
    M: int
    E: int
    H: int
    top_k: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class Routing:
    """Operands of a router, and output tensors that its kernels fill as `router.route_by` defines.

    x (M, H), the router's weight (E, H) and logits_bias (E,) or None: contiguous; of one dtype, unless the call is MIXED. ids
    (M, top_k) int64, weights (M, top_k) fp32.
    """

    x: torch.Tensor
    facts: RouterFacts
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, f: RouterFacts) -> "Routing":
        """The operands of `router.route_by`, with tensors to be filled."""
        ids = torch.empty(x.shape[0], f.top_k, dtype=torch.int64, device=x.device)
        weights = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
        return cls(x, f, ids, weights)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, E, H, top_k."""
        return self.x.shape[0], self.facts.weight.shape[0], self.x.shape[1], self.ids.shape[1]

    @property
    def call(self) -> RouteCall:
        """The facts that dispatch uses."""
        x, f = self.x, self.facts
        mixed = any(t is not None and t.dtype != x.dtype for t in (f.weight, f.logits_bias))
        beyond = (*f.beyond, MIXED) if mixed else f.beyond
        return RouteCall(*self.sizes, x.dtype, x.device.type, capability(x.device), beyond)


def route_by(x: torch.Tensor, f: RouterFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """As `router.route_by`, by the kernel that dispatch chooses."""
    r = Routing.of(x, f)
    spec, config = select(r.call)
    return spec.launch(r, config), r.weights


@register("torch/route", op="route", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)
def by_definition(r: Routing, config: Config) -> torch.Tensor:
    """See `RouteCall`."""
    ids, weights = router.route_by(r.x, r.facts)
    r.weights.copy_(weights)
    return r.ids.copy_(ids)
