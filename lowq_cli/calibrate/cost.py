"""The estimated time of a calibration: its operations and the measured rate of a matmul, and on a GPU its launches, too."""

import re
import time
from collections.abc import Callable
from functools import cache

import torch

from lowq_cli import quantizers
from lowq_cli.calibrate import texts
from lowq_cli.calibrate.learn import EPOCHS
from lowq_cli.calibrate.requirements import (
    ALONE_TOKENS,
    CURVED_TOKENS,
    UNSEEN,
    learns_alone,
    part_count,
    pass_count,
    rounds_both_sides,
)
from lowq_cli.plan.plan import Item, Plan
from lowq_cli.quantizers import _table_book, lsq, yaqa
from lowq_packers.scheme import Scheme

# Duration of a calibration divided by the time that its operations take at the rate of one large matmul: the calibration's
# matmuls are smaller, and it reads and writes between them. On one core, ATTENTION included: gptq takes 69 s for story (64 s at
# that rate) and 197 s for base (178 s), 65,536 tokens each. On an H200, layers of gptq and yaqa of 1B's and 8B's shapes, SETUP
# left out: 1.3 to 1.7 times.
OVERHEAD = {"cpu": 1.1, "cuda": 1.4}
# Duration of attention divided by that of its two products at the matmul's rate, all positions counted: in the walk, and where
# all layers are trained together, with the softmax over the vocabulary. On one core in fp32: 21 s instead of 15 s of story's
# gptq; distill of story with 16,384 tokens in 131 to 147 s (124 s by these), of base with 8,192 in 163 to 223 s (181 s). On a
# GPU attention is within OVERHEAD and RECORDED.
ATTENTION, LEARNING_ATTENTION = {"cpu": 1.4, "cuda": 0.0}, {"cpu": 4.0, "cuda": 0.0}
ATTENDED = 8  # times that a layer's attention runs per token: in both streams, and again up to each of four stages
# Width of the matmul whose rate counts. On an H200 one of 1,024 takes 0.1 ms, most of it the host's: 2.3e13 operations per
# second, and 1.1e13 right after a pause; 4,096: 5.0e13, as 8,192.
WIDTH = {"cpu": 1024, "cuda": 4096}
# Seconds that a GPU's calibration takes beside its layers: kernels compiled, texts read, files written. Measured: 9 to 12 s for
# four layers of 1B's and two of 8B's shape on an H200.
SETUP = 10.0
WITHIN = 2  # factor by which a calibration may be slower or faster than estimated: covers those two runs and busy machines
TIMINGS = 5  # timings of the matmul that gives the rate; the shortest counts, since other work delays some
CLOCKS_UP = 0.3  # seconds of work before timings on a GPU: after some 10 s without, an H200's first 14 ms had 0.4 of its rate
ROUNDING = 8  # slowdown of rounding against a matmul, measured on two cores; see `operations`
LEARNING = 2.5  # slowdown of learning; story, 16,384 tokens, one core: 155 s for 6.0e12 operations; a matmul does 97e9/s
# Duration of training all layers together as CUDA graphs, divided by the time of its operations at the matmul's rate, OVERHEAD
# included. On an H200: base, 1,152 steps in 30 s, 1.8; four layers of 1B's shape 1.1, two of 8B's 0.8 (the curvature included).
RECORDED = 1.2
# Launches per group of columns that gptq rounds: with the kernels of `fit_grid` and `Book`; without them by kind of zero, for a
# table per column and per group, as the table with the most takes. Counted by test_estimates.py on a CPU, kernels as one each.
# A launch is taken to last as long as one of a row of equal small ops, which is timed: 11 to 19 us on an H200's host, and
# 15 us per launch in gptq on an H100's (about 300 launches in 4.5 ms per group).
BY_KERNEL = 6
BY_TORCH = {"none": 333, "int": 957, "float": 439}
TABLE_COLUMN, TABLE_GROUP = 12, 800
LAUNCHES = 100  # ops between two synchronisations when a launch is timed


def seconds(plan: Plan, device: torch.device) -> float:
    """Estimated seconds of a calibration: its operations at the rate of a matmul that is timed here, and a GPU's launches."""
    (alone, together), kind = _operations(plan), "cuda" if device.type == "cuda" else "cpu"
    recorded = kind == "cuda" and all(i.kind != "expert" for i in plan.items)
    over, layer = OVERHEAD[kind], _attention(plan) * plan.recipe.tokens
    slower = RECORDED / over if recorded else LEARNING if kind == "cuda" else 1.0
    alone += ATTENTION[kind] * ATTENDED * layer
    learnt = LEARNING_ATTENTION[kind] * _runs(plan) / 2 * (UNSEEN + 1) / UNSEEN * layer if together else 0.0
    work = over * (alone + slower * together + learnt) * _operation_s(device)
    if device.type != "cuda" or not work:
        return work
    return work + SETUP + sum(_launches(i, device.type) for i in plan.items) * _launch_s(device)


def _launches(item: Item, device: str) -> float:
    """The launches that round a matrix column by column; 0 for methods that do not."""
    if not item.scheme or not item.method or not quantizers.carries_errors(item.method):
        return 0
    N, K = item.shape[-2:]
    rounds = -(-N // max(1, quantizers.GPTQ_SLAB // K))
    if rounds_both_sides(item):
        rounds = max(rounds, min(yaqa.STEPS, -(-N // yaqa.FEWEST)))
    return item.params / (N * K) * rounds * item.scheme.groups(K) * _group_launches(item.scheme, device)


def _group_launches(scheme: Scheme, device: str) -> int:
    """The launches that round a group of columns."""
    kernel = (_table_book if scheme.table else lsq).implementation(device)
    if kernel and scheme.group_size <= kernel.MOST:
        return BY_KERNEL
    if scheme.table:  # in groups beyond MOST, columns still take one launch per block
        return TABLE_GROUP + (0 if _table_book.rounding(device) else TABLE_COLUMN * scheme.group_size)
    return BY_TORCH[scheme.zero]


@cache
def _launch_s(device: torch.device) -> float:
    """Seconds of a launch of a small operation, timed once per process."""
    x = torch.zeros(16, 16, device=device)

    def many() -> torch.Tensor:
        for _ in range(LAUNCHES):
            x.add_(1)
        return x

    return fastest_s(many) / LAUNCHES


@cache
def _operation_s(device: torch.device) -> float:
    """Seconds per operation of a large matmul, timed once per process: a run makes several plans."""
    width = WIDTH.get(device.type, WIDTH["cpu"])
    x = torch.randn(width, width, device=device)
    return fastest_s(lambda: x @ x) / (2 * width**3)


@cache
def _clock_up(device: torch.device) -> None:
    """Make a GPU raise its clocks, once per process: what times one thing goes on to the next."""
    x, until = torch.ones(WIDTH["cpu"], WIDTH["cpu"], device=device), time.perf_counter() + CLOCKS_UP
    while time.perf_counter() < until:
        (x @ x)[0, 0].item()


def fastest_s(f: Callable[[], torch.Tensor]) -> float:
    """The shortest of TIMINGS times in seconds of an operation on matrices, each synchronised with the device."""
    first = f()
    first[0, 0].item()  # warm-up: the library's start-up does not count
    if first.is_cuda:
        _clock_up(first.device)
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


def _attention(plan: Plan) -> float:
    """The operations of all layers' attention per token: its products with all keys and values of its window."""
    matrices = [i for i in plan.items if i.kind == "attention" and len(i.shape) == 2]  # not biases
    layers = {m[1]: i.shape[1] for i in matrices if (m := re.search(r"\.(\d+)\.", i.name))}
    return 4.0 * texts.WINDOW * sum(layers.values())


def _runs(plan: Plan) -> int:
    """The operations per weight and token where all layers are trained together; see `_operations`."""
    items = [i for i in plan.items if i.method and quantizers.needs_text(i.method)]
    weights = sum(i.params for i in items)
    return 8 * pass_count(items, weights) + 2 * part_count(items, weights) + 2


def _operations(plan: Plan) -> tuple[float, float]:
    """The operations of the walk, slower ones counted as more, and those of training all layers together, as they are.

    Both streams run through each layer, and again up to each of about four stages: 9 operations per weight and token. Moments
    are two matmuls per stage; rounding a matrix (N, K) carries errors over its columns, as slow as ROUNDING matmuls by
    (K, K). The curvature takes one forward pass and one backward pass, which counts as two. Learning runs a layer once forwards
    and once backwards (which counts as two) per epoch, and also before and after; learning all layers together runs each once
    more forwards, with the tables, and the original once where a pass has its own part of the text; a step takes LEARNING times
    as long as its matmuls, less where it is a CUDA graph.
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
            return work, read * _runs(plan) * (sum(learning) + tables)
    return work, 0.0
