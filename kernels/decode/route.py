"""route: which kernel picks the experts of tokens (op "route"), and the definition as the last of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.decode import reference
from lowq_kernels.dispatch.registry import LAST_RESORT, Op, capability, register, select


@dataclass(frozen=True)
class RouteCall:
    """M tokens of H features, top_k of E experts each.

    Its kernels are launch(x, router, top_k, normalise, rounded, bias, config) -> (ids, weights), as `reference.route`; x
    (M, H), router (E, H) and bias (E,) or None contiguous, of one dtype.
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
    ids, weights = spec.launch(x, router, top_k, normalise, rounded, bias, config)
    return ids, weights


register(
    "torch/route",
    op="route",
    devices=("cpu", "cuda"),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    rank=LAST_RESORT,
)(lambda *operands: reference.route(*operands[:-1]))  # the last is the config
