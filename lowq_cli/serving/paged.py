"""The cache of an engine: as many blocks as there is room for beside the largest pass, which is run to see what it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowq_cli import memory
from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.prompts import context_limit
from lowq_cli.engine.state import BLOCK, block_bytes
from lowq_cli.engine.warm import products
from lowq_cli.serving.pace import Pace
from lowq_cli.serving.passes import Passes
from lowq_cli.serving.rows import Rows
from lowq_cli.serving.schedule import READERS
from lowq_kernels.decode import kv
from lowq_kernels.dispatch.precompile import launch_all
from lowq_packers.arch.parts import Pages
from lowq_packers.errors import DoesNotFitError

NO_LIMIT = 32768  # tokens of a text whose model names no limit
SHARE = {"cuda": 0.95, "cpu": 0.5}  # of the memory that is left
BESIDE = 1 << 30  # bytes of a GPU: what recorded passes and libraries take besides
LITTLE = 0.25  # of a GPU's free memory: a cache that takes no more leaves room for any pass, which then is not tried
LEAST = 2  # blocks, nobody's among them


@dataclass(frozen=True)
class Cache:
    """`blocks` blocks, and the passes that use them; longest: tokens of a text; bytes: of all blocks."""

    passes: Passes
    blocks: int
    longest: int
    bytes: int


@torch.inference_mode()
def make_cache(
    model: Any, plan: Plan, kind: str, most: int, tokens: int | None, fixed: bool, reads: int | None = None
) -> Cache:
    """A cache for `most` texts at once, of at most `tokens` tokens, held as `kind` says; of prompts of `reads` in all.

    Raises DoesNotFitError.
    """
    device = plan.device
    longest = context_limit(model) or NO_LIMIT
    block = sum(block_bytes(spec, kind, plan.dtype) for spec in plan.states if isinstance(spec, Pages))
    wanted = min(tokens or most * longest, most * longest)
    try:
        pace, room, blocks = None, memory.available_memory(), 1 + -(-wanted // BLOCK)
        little = device.type == "cuda" and reads is not None and blocks * block <= LITTLE * torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda":
            room, pace = (None, None) if little else _room(model, plan, kind, most, longest, fixed)
        if room is not None:
            blocks = min(blocks, int(room * SHARE[device.type]) // block)
        if blocks < LEAST:
            raise DoesNotFitError(f"{device} has no room for a cache; take fewer bits, or a device with more memory")
        longest = min(longest, (blocks - 1) * BLOCK)
        passes = _passes(plan, kind, most, longest, blocks, fixed)
        passes.pace = pace or passes.pace
        if little:
            passes.rows.flush()
            launch_all(launches(model, passes, reads), lambda n, of: None)
        return Cache(passes, blocks, longest, blocks * block)
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{device} has no room to serve this model; take fewer bits, or fewer texts at once") from e


def _passes(plan: Plan, kind: str, most: int, longest: int, blocks: int, fixed: bool) -> Passes:
    width = -(-longest // BLOCK) + 1  # one column that stays empty: a step past a text's end writes to nobody's block
    rows, state, make = Rows(most + READERS, width, plan.device), list[KeyValues | States](), partial(kv.empty, kind)
    for spec in plan.states:
        assert isinstance(spec, Pages)
        pair = list[kv.Cache]()
        for D in (spec.k_dim, spec.v_dim):
            if plan.device.type == "cuda":
                pair.append(make((blocks, spec.heads, BLOCK, D), plan.dtype, plan.device))
            else:  # blocks side by side in memory where they are so in number: attention then reads them as they are
                pair.append(make((spec.heads, blocks, BLOCK, D), plan.dtype, plan.device).transpose(0, 1))
            kv.part(pair[-1], slice(0, 1)).zero_()
        state.append(KeyValues(pair[0], pair[1], rows.table))
    return Passes(plan, rows, most, state, width * BLOCK, fixed)


def trial_passes(plan: Plan, kind: str, most: int, longest: int, fixed: bool) -> Passes:
    """Passes over two blocks that are nobody's."""
    passes = _passes(plan, kind, most, longest, LEAST, fixed)
    passes.rows.flush()
    return passes


def launches(model: Any, trial: Passes, reads: int | None = None) -> list[Callable[[], object]]:
    """One launch of each kernel that passes of every size take; of those that read `reads` prompt tokens in all."""
    largest = next((t for t in trial.totals if reads is not None and t >= reads + trial.riding(trial.most)), trial.totals[-1])
    rows = {*trial.sizes, *(t for t in trial.totals if t <= largest)}
    return [*products(trial.plan.linears, trial.plan.dtype, rows), *(partial(trial.forward, s, s, None, 0) for s in trial.sizes)]


def _room(model: Any, plan: Plan, kind: str, most: int, longest: int, fixed: bool) -> tuple[int, Pace]:
    """Bytes that are left beside the largest pass, and how long passes take. Compiles the kernels of all passes on the way."""
    trial = trial_passes(plan, kind, most, longest, fixed)
    launch_all(launches(model, trial), lambda n, of: None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for M in (t for t in trial.totals if t > trial.most_recorded):  # the others once they are recorded
        trial.measure(trial.riding(most) if max(trial.totals) == M and not fixed else 0, M)
    peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept - peak - trial.graph_bytes() - BESIDE, trial.pace
