"""The steps of a mixture of experts: the router's choice, and the chosen experts' sum."""

from dataclasses import dataclass
from typing import Any

import torch

from lowq_cli.engine.steps import Frame, Step
from lowq_kernels.decode.router import RouterFacts


@dataclass(frozen=True, eq=False)
class Route(Step):
    """Choose each token's experts and their weights, and keep both for `Experts`. source: "y", or "x" for a router with a norm
    of its own."""

    facts: RouterFacts
    source: str = "y"
    what = "router"

    def compiled_for(self) -> tuple[object, ...]:
        return self.facts.top_k, self.facts.weight.shape, self.facts.beyond

    def run(self, f: Frame) -> None:
        f.kept["ids"], f.kept["weights"] = f.ops.route_by(f.x if self.source == "x" else f.y, self.facts)


@dataclass(frozen=True, eq=False)
class Experts(Step):
    """y = the weighted sum of a token's experts. weigh_inputs: the weights multiply the experts' inputs, not their outputs."""

    experts: Any
    weigh_inputs: bool = False
    what = "experts"

    def run(self, f: Frame) -> None:
        ids, weights, x = f.kept.pop("ids"), f.kept.pop("weights"), f.y
        if not self.weigh_inputs:
            f.y = self.experts(x, ids, weights)
            return
        given = (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1)
        y = self.experts(given, ids.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        f.y = y.reshape(*ids.shape, -1).sum(1)
