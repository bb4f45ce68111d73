"""The estimated time of a calibration: its operations, and the measured rate of a matmul."""

import re
import time
from collections.abc import Callable
from functools import cache

import torch

from lowq_cli import quantizers
from lowq_cli.calibrate.learn import EPOCHS
from lowq_cli.calibrate.requirements import ALONE_TOKENS, CURVED_TOKENS, UNSEEN, learns_alone, pass_count, rounds_both_sides
from lowq_cli.plan.plan import Plan

# Duration of a calibration divided by the time that its operations take at the rate of one large matmul: the calibration's
# matmuls are smaller, and it reads and writes between them. Measured twice with the demo, --recipe small, on one core: 86 s
# instead of 36 s at that rate (2.4 times), and 112.5 s instead of 41 s (2.7 times).
OVERHEAD = 2.6
WITHIN = 2  # factor by which a calibration may be slower or faster than estimated: covers those two runs and busy machines
TIMINGS = 5  # timings of the matmul that gives the rate; the shortest counts, since other work delays some
ROUNDING = 8  # slowdown of rounding against a matmul, measured on two cores; see `operations`
LEARNING = 2.5  # slowdown of learning; story, 16,384 tokens, one core: 155 s for 6.0e12 operations; a matmul does 97e9/s
# Duration of training all layers together as CUDA graphs, divided by the time of its operations at the matmul's rate, OVERHEAD
# included. Base on an H200: 1,152 steps in 30 s, 2.8e13 operations per second; the matmul's rate is taken as 3.6e13 there.
RECORDED = 1.3


def seconds(plan: Plan, device: torch.device) -> float:
    """Estimated seconds of a calibration: its operations at the rate of a matmul that is timed here."""
    alone, together = _operations(plan)
    recorded = device.type == "cuda" and all(i.kind != "expert" for i in plan.items)
    return (OVERHEAD * alone + (RECORDED if recorded else OVERHEAD * LEARNING) * together) * _operation_s(device)


@cache
def _operation_s(device: torch.device) -> float:
    """Seconds per operation of a large matmul, timed once per process: a run makes several plans."""
    x = torch.randn(1024, 1024, device=device)
    return fastest_s(lambda: x @ x) / (2 * 1024**3)


def fastest_s(f: Callable[[], torch.Tensor]) -> float:
    """The shortest of TIMINGS times in seconds of an operation on matrices, each synchronised with the device."""
    f()[0, 0].item()  # warm-up: the library's start-up does not count
    times = []
    for _ in range(TIMINGS):
        began = time.perf_counter()
        f()[0, 0].item()
        times.append(time.perf_counter() - began)
    return min(times)


def operations(plan: Plan) -> float:
    """The number of matmul operations of a calibration, slower ones counted as more; it does not depend on the machine."""
    alone, together = _operations(plan)
    return alone + LEARNING * together


def _operations(plan: Plan) -> tuple[float, float]:
    """The operations of the walk, slower ones counted as more, and those of training all layers together, as they are.

    Both streams run through each layer, and again up to each of about four stages: 9 operations per weight and token. Moments
    are two matmuls per stage; rounding a matrix (N, K) carries errors over its columns, as slow as ROUNDING matmuls by
    (K, K). The curvature takes one forward pass and one backward pass, which counts as two. Learning runs a layer once forwards
    and once backwards (which counts as two) per epoch, and also before and after; learning all layers together runs each once
    more forwards, with the tables; a step takes LEARNING times as long as its matmuls, less where it is a CUDA graph.
    """
    items = [i for i in plan.items if i.method and quantizers.needs_text(i.method)]
    tokens = plan.recipe.tokens
    layers = len({m[1] for i in items if (m := re.search(r"\.(\d+)\.", i.name))})
    widths = sorted({i.shape[1] for i in items})
    work = 9.0 * tokens * sum(i.params for i in items)
    work += 4.0 * tokens * layers * (3 * widths[0] ** 2 + widths[-1] ** 2)
    work += ROUNDING * sum(2.0 * i.params * i.shape[1] for i in items)
    tables = sum(i.params for i in plan.items if i.kind in ("embedding", "head"))
    if any(rounds_both_sides(i) for i in items):
        work += LEARNING * 6.0 * min(tokens, CURVED_TOKENS) * (sum(i.params for i in items) + tables)
    if learning := [i.params for i in items if quantizers.needs_learning(str(i.method))]:
        read = tokens * (UNSEEN + 1) / UNSEEN
        distills = any(quantizers.needs_distilling(str(i.method)) for i in items)
        weights = sum(i.params for i in items)
        alone = sum(i.params for i in items if learns_alone(i, weights))
        work += LEARNING * (min(read, ALONE_TOKENS) if distills else read) * 6 * (EPOCHS + 1) * alone
        if distills:
            return work, read * (8 * pass_count(items, weights) + 4) * (sum(learning) + tables)
    return work, 0.0
