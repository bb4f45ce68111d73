"""The experts of a token and their weights, for the routers of all families: the definition, in torch and fp32."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from lowq_kernels.decode import norms
from lowq_kernels.decode.norms import Norm


@dataclass(frozen=True)
class RouterFacts:
    """A router of E experts over H features. weight (E, H), logits_bias (E,) or None: logits = x weight^T + logits_bias.

    score: the function of the logits. A softmax over the chosen experts' logits alone is "softmax" with `normalise`.
    choice_bias (E,) or None: added to the scores for the choice alone.
    groups (n, kept): the experts are n consecutive groups; a token uses only experts of the `kept` best groups, by the sum of a
    group's two largest scores ("top2") or by its largest score ("max").
    normalise: the weights are divided by their sum + sum_eps. They are multiplied by `factor`, then by each (E,), a factor per
    expert; rounded: then rounded to x's dtype.
    norm, scale (H,): x is first normed, then multiplied by scale and H^-0.5 (Gemma 4).
    """

    weight: torch.Tensor
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    logits_bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    groups: tuple[int, int] = (1, 1)
    group_score: Literal["top2", "max"] = "top2"
    normalise: bool = True
    sum_eps: float = 0.0
    factor: float = 1.0
    rounded: bool = False
    norm: Norm | None = None
    scale: torch.Tensor | None = None
    each: torch.Tensor | None = None

    @property
    def beyond(self) -> tuple[str, ...]:
        """Names of facts beyond a softmax over all experts (normalised or not, rounded or not) that a kernel must support."""
        facts = {
            "sigmoid": self.score != "softmax",
            "choice_bias": self.choice_bias is not None,
            "groups": self.groups != (1, 1),
            "sum_eps": self.normalise and self.sum_eps != 0.0,
            "factor": self.factor != 1.0,
            "norm": self.norm is not None,
            "a norm with factors": self.norm is not None and (self.norm.weight is not None or not self.norm.is_rms),
            "scale": self.scale is not None,
            "each": self.each is not None,
        }
        return tuple(name for name, there in facts.items() if there)


def route_by(x: torch.Tensor, f: RouterFacts) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (M, top_k) int64 and weights (M, top_k) fp32 of each row of x (M, H). Logits of a router without facts beyond a
    softmax are rounded to the router's dtype; the others' are in fp32."""
    if not f.beyond:
        top = logits(x, f).softmax(-1, dtype=torch.float32).topk(f.top_k)
        weights = top.values / top.values.sum(-1, keepdim=True) if f.normalise else top.values
        return top.indices, weights.to(x.dtype).float() if f.rounded else weights
    scores = logits(x, f).softmax(-1) if f.score == "softmax" else logits(x, f).sigmoid()
    choice = scores if f.choice_bias is None else scores + f.choice_bias.float()
    ids = _of_best_groups(choice, f).topk(f.top_k, -1).indices
    weights = scores.gather(1, ids)
    if f.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + f.sum_eps)
    weights = weights * f.factor
    if f.each is not None:
        weights = weights * f.each.float()[ids]
    return ids, weights.to(x.dtype).float() if f.rounded else weights


def logits(x: torch.Tensor, f: RouterFacts) -> torch.Tensor:
    """(M, E): in the router's dtype without facts beyond a softmax, else in fp32; on a GPU summed so from 16-bit operands."""
    if not f.beyond:
        return F.linear(x.to(f.weight.dtype), f.weight, f.logits_bias)
    bias = None if f.logits_bias is None else f.logits_bias.float()
    if x.is_cuda and f.norm is None and f.scale is None and x.dtype == f.weight.dtype != torch.float32:
        y = torch.mm(x, f.weight.mT, out_dtype=torch.float32)
        return y if bias is None else y + bias
    y = x.float() if f.norm is None else norms.in_fp32(x, f.norm)
    if f.scale is not None:
        y = y * f.scale.float() * x.shape[-1] ** -0.5
    return F.linear(y, f.weight.float(), bias)


def _of_best_groups(choice: torch.Tensor, f: RouterFacts) -> torch.Tensor:
    """Scores (M, E), -inf for experts outside the best groups."""
    n, kept = f.groups
    if n == kept:
        return choice
    by_group = choice.unflatten(-1, (n, -1))
    best = by_group.topk(2, -1).values.sum(-1) if f.group_score == "top2" else by_group.amax(-1)
    out = torch.ones_like(best, dtype=torch.bool).scatter(1, best.topk(kept, -1).indices, False)
    return by_group.masked_fill(out[..., None], -torch.inf).flatten(-2)
