"""Norms of any family, and the update of the residual stream, in torch: fp32 inside, rounded once to the output's dtype."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

Kind = Literal["rms", "layer"]


class Norm(NamedTuple):
    """A norm over the last dim of what it is applied to.

    weight: factors that broadcast to x (if the family multiplies by 1 + weight, the 1 is already added), or None. bias: added
    last. kind "layer" subtracts the mean first. groups: the last dim is normed in this many equal parts separately.
    """

    weight: torch.Tensor | None
    eps: float
    kind: Kind = "rms"
    bias: torch.Tensor | None = None
    groups: int = 1

    @property
    def is_rms(self) -> bool:
        """Whether it is an RMSNorm over all of x, without a bias."""
        return self.kind == "rms" and self.bias is None and self.groups == 1


def in_fp32(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """`normed` before rounding."""
    y = x.float().unflatten(-1, (norm.groups, -1))
    if norm.kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2)
    if norm.weight is not None:
        y = y * norm.weight.float()
    return y if norm.bias is None else y + norm.bias.float()


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm of x (..., K) over its last dim, in x's dtype."""
    return in_fp32(x, norm).to(x.dtype)


def beside(a: torch.Tensor, b: torch.Tensor, a_norm: Norm | None = None, b_norm: Norm | None = None) -> torch.Tensor:
    """(M, 2 H): rows of a and b (M, H) concatenated, each normed first if its norm is given."""
    parts = (x if norm is None else normed(x, norm) for x, norm in ((a, a_norm), (b, b_norm)))
    return torch.cat([*parts], -1)


class Addition(NamedTuple):
    """How `add` adds delta (M, H) to the residual stream x: x <- (x + scale * post(delta + second)) * after, rounded once.

    after: one value. second (M, H): None adds delta alone. own: norms of delta and of second, each applied before the sum.
    """

    post: Norm | None = None
    scale: float = 1.0
    after: torch.Tensor | None = None
    second: torch.Tensor | None = None
    own: tuple[Norm, Norm] | None = None


ALONE = Addition()  # x <- x + delta


def add(x: torch.Tensor, delta: torch.Tensor, how: Addition = ALONE) -> None:
    """The update of the residual stream x (M, H), in place."""
    one, two = how.own or (None, None)
    added = delta.float() if one is None else in_fp32(delta, one)
    if how.second is not None:
        added = added + (how.second.float() if two is None else in_fp32(how.second, two))
    added = added if how.post is None else in_fp32(added, how.post)
    y = torch.add(x.float(), added, alpha=how.scale)
    x.copy_(y if how.after is None else y * how.after.float())


def update_norm(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, how: Addition = ALONE) -> torch.Tensor:
    """`add` if delta is given, then the norm of x (M, H)."""
    if delta is not None:
        add(x, delta, how)
    return normed(x, norm)


def update_norms(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norms: tuple[Norm, Norm],
    how: Addition = ALONE,
    *,
    update_norm: Callable[..., torch.Tensor] = update_norm,
    normed: Callable[..., torch.Tensor] = normed,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `update_norm`, with two norms of the same x: those of the branches of a parallel block. The last two operands are
    what computes it."""
    return update_norm(x, delta, norms[0], how), normed(x, norms[1])
