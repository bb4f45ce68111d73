"""us of a model's step, with and without what a head reads, and of the head's guesses, each in a CUDA graph: a row a batch.

python benchmarks/draft_steps.py MODEL HEAD
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lowq_cli.engine import heads, ready
from lowq_cli.engine.batch import Batch
from lowq_cli.engine.graph import capture
from lowq_cli.engine.heads import HeadPlan
from lowq_cli.engine.plan import Plan, plan_of
from lowq_cli.engine.state import static_state

SLOTS, AT, TIMES = 512, 200, 200


def timed(step: Callable[[], object]) -> float:
    """us of a recorded step."""
    recorded = capture(step)
    for _ in range(20):
        recorded.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMES):
        recorded.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began) / TIMES


class Timing:
    """Steps of B texts at one position."""

    def __init__(self, plan: Plan, head: HeadPlan, B: int) -> None:
        self.plan, self.head, self.B, device = plan, head, B, plan.device
        self.state, self.own = (static_state(p, B, SLOTS, "16") for p in (plan, head))
        self.angles, self.turned = (p.angles(SLOTS, device) for p in (plan, head))
        self.pos = torch.full((B,), AT, dtype=torch.int32, device=device)
        self.ids = torch.full((B,), 5, dtype=torch.int64, device=device)
        self.places = torch.arange(1, B + 1, device=device)
        self.x = torch.randn(B, head.model.hidden, device=device, dtype=plan.dtype)

    def step(self, tapped: bool) -> None:
        """One of the model."""
        taps: list[torch.Tensor] = []
        batch = Batch(self.plan.ops, self.ids, self.B, self.pos, self.angles, self.places)
        y = self.plan.hidden(self.plan.embed(self.ids), batch, self.state, taps if tapped else None)
        self.plan.logits(y).argmax(-1)
        if tapped:
            self.head.entering(taps or [y])

    def guesses(self, K: int) -> None:
        """K of the head."""
        ids, x = self.ids, self.x.clone()
        for _ in range(K):
            batch = Batch(self.head.ops, ids, self.B, self.pos, self.turned, self.places)
            y, x = self.head.guess(ids, x, batch, self.own)
            ids = self.head.ids(self.head.logits(y).argmax(-1))


@torch.inference_mode()
def main() -> None:
    """A row for each batch."""
    model: Any = ready.ready(sys.argv[1], "cuda")[0]
    plan, head = plan_of(model), heads.load(sys.argv[2], model)
    for B in (1, 4, 8, 16):
        timing = Timing(plan, head, B)
        plan.tap(())
        row = {"batch": B, "step_us": timed(partial(timing.step, False))}
        plan.tap(tuple(i for i in head.layers if i >= 0))
        row["step_read_us"] = timed(partial(timing.step, True))
        row |= {f"guesses_{k}_us": timed(partial(timing.guesses, k)) for k in (1, 2, 4)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
