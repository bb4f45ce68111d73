"""The cache of an engine: as many blocks as there is room for beside the largest pass, which is run to see what it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowq_cli import memory
from lowq_cli.engine.fused import FusedDecoder
from lowq_cli.engine.prompts import context_limit
from lowq_cli.engine.warm import products
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.passes import BLOCK, Passes
from lowq_cli.serving.scheduler import READERS
from lowq_cli.serving.token_budget import TokenBudget
from lowq_kernels.decode import kv
from lowq_kernels.dispatch.precompile import launch_all
from lowq_packers.errors import DoesNotFitError

NO_LIMIT = 32768  # tokens of a text whose model names no limit
SHARE = {"cuda": 0.95, "cpu": 0.5}  # of the memory that is left
BESIDE = 1 << 30  # bytes of a GPU: what recorded passes and libraries take besides
LITTLE = 0.25  # of a GPU's free memory: a cache that takes no more leaves room for any pass, which then is not tried
LEAST = 2  # blocks, the null block among them


@dataclass(frozen=True)
class Cache:
    """`blocks` blocks, and the passes that use them; longest: tokens of a text; bytes: of all blocks."""

    passes: Passes
    blocks: int
    longest: int
    bytes: int


@torch.inference_mode()
def make_cache(
    model: Any, decoder: FusedDecoder, most: int, tokens: int | None, fixed: bool, reads: int | None = None
) -> Cache:
    """A cache for `most` texts at once, of at most `tokens` tokens; of prompts of `reads` in all. Raises DoesNotFitError."""
    device, layers = decoder.device, decoder.blocks.layers
    longest = context_limit(model) or NO_LIMIT
    block = sum(2 * layer.heads.HKV * BLOCK * kv.slot_bytes(decoder.kv, layer.heads.D, decoder.dtype) for layer in layers)
    wanted = min(tokens or most * longest, most * longest)
    try:
        token_budget, room, blocks = None, memory.available_memory(), 1 + -(-wanted // BLOCK)
        little = device.type == "cuda" and reads is not None and blocks * block <= LITTLE * torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda":
            room, token_budget = (None, None) if little else _room(model, decoder, most, longest, fixed)
        if room is not None:
            blocks = min(blocks, int(room * SHARE[device.type]) // block)
        if blocks < LEAST:
            raise DoesNotFitError(f"{device} has no room for a cache; take fewer bits, or a device with more memory")
        longest = min(longest, (blocks - 1) * BLOCK)
        passes = _passes(decoder, most, longest, blocks, fixed)
        passes.token_budget = token_budget or passes.token_budget
        if little:
            passes.rows.flush()
            launch_all(launches(model, passes, reads), lambda n, of: None)
        return Cache(passes, blocks, longest, blocks * block)
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{device} has no room to serve this model; take fewer bits, or fewer texts at once") from e


def _passes(decoder: FusedDecoder, most: int, longest: int, blocks: int, fixed: bool) -> Passes:
    width = -(-longest // BLOCK) + 1  # one column that stays empty: a step past a text's end writes to the null block
    caches = []
    for layer in decoder.blocks.layers:
        heads, pair, make = layer.heads, list[kv.Cache](), partial(kv.empty, decoder.kv)
        for _ in range(2):
            if decoder.device.type == "cuda":
                pair.append(make((blocks, heads.HKV, BLOCK, heads.D), decoder.dtype, decoder.device))
            else:  # blocks side by side in memory where they are so in number: attention then reads them as they are
                pair.append(make((heads.HKV, blocks, BLOCK, heads.D), decoder.dtype, decoder.device).transpose(0, 1))
            kv.part(pair[-1], slice(0, 1)).zero_()
        caches.append((pair[0], pair[1]))
    return Passes(decoder, BatchState(most + READERS, [width], decoder.device), most, caches, width * BLOCK, fixed)


def trial_passes(decoder: FusedDecoder, most: int, longest: int, fixed: bool) -> Passes:
    """Passes over two blocks, one of them the null block."""
    passes = _passes(decoder, most, longest, LEAST, fixed)
    passes.rows.flush()
    return passes


def launches(model: Any, trial: Passes, reads: int | None = None) -> list[Callable[[], object]]:
    """One launch of each kernel that passes of every size take; of those that read `reads` prompt tokens in all."""
    largest = next((t for t in trial.totals if reads is not None and t >= reads + trial.riding(trial.most)), trial.totals[-1])
    rows = {*trial.sizes, *(t for t in trial.totals if t <= largest)}
    return [*products(model, trial.decoder, rows), *(partial(trial.forward, s, s, None, 0) for s in trial.sizes)]


def _room(model: Any, decoder: FusedDecoder, most: int, longest: int, fixed: bool) -> tuple[int, TokenBudget]:
    """Bytes that are left beside the largest pass, and how long passes take. Compiles the kernels of all passes on the way."""
    trial = trial_passes(decoder, most, longest, fixed)
    launch_all(launches(model, trial), lambda n, of: None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for M in (t for t in trial.totals if t > trial.most_recorded):  # the others once they are recorded
        trial.measure(trial.riding(most) if max(trial.totals) == M and not fixed else 0, M)
    peak = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return torch.cuda.mem_get_info()[0] + kept - peak - trial.graph_bytes() - BESIDE, trial.token_budget
