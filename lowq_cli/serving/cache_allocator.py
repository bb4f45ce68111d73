"""Allocate the cache of an engine: all memory that the largest pass leaves free, which is run to measure its memory.

Layers that keep the same kind of state form a group: all tokens, the last tokens of a window, or a state of fixed size. Each
group has a separate number of blocks; a group with a window has as many as its sequences can hold at any length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowq_cli import memory
from lowq_cli.engine.batch import KeyValues, States
from lowq_cli.engine.kernel_launches import products
from lowq_cli.engine.mixer_steps import Attend
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.prompts import context_limit
from lowq_cli.engine.state import BLOCK, block_bytes, recurrent, state_bytes
from lowq_cli.serving.batch_state import BatchState
from lowq_cli.serving.cache_groups import Group
from lowq_cli.serving.measurements import Measurements
from lowq_cli.serving.model_runner import ModelRunner
from lowq_cli.serving.pass_sizes import TOTALS
from lowq_cli.serving.scheduler import MOST_PREFILLING
from lowq_cli.serving.token_budget import TokenBudget
from lowq_kernels import gpu
from lowq_kernels.decode import kv
from lowq_kernels.decode.prompt_call import PromptCall
from lowq_kernels.decode.reference import TILE
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.dispatch.registry import find
from lowq_kernels.graphs import empty_cache, retried, wait
from lowq_packers.arch.parts import Pages, Recurrent
from lowq_packers.errors import DoesNotFitError

NO_LIMIT = 32768  # max. tokens of a sequence if the model's config names no limit
SHARE = {"cuda": 0.95, "cpu": 0.5}  # fraction of the free memory that the cache takes
BESIDE = 1 << 30  # bytes of a GPU that are left for recorded passes and libraries
LITTLE = 0.25  # a cache below this fraction of a GPU's free memory leaves room for any pass: no trial pass is needed
# Free bytes of a GPU that suffice for any pass, and for launches of kernels in threads: logits of 4,096 rows take 1 GB in each.
ROOM = 12 << 30
LEAST = 2  # min. blocks of a cache, including the null block
SNAPSHOTS = 2  # snapshots of recurrent states per running sequence: one of its prompt and one of its answer
COPIES = 32  # slots of recurrent states for rows of drafts: the longest drafts of two sequences in a pass
PIECE = TOTALS[-1]  # max. tokens of one sequence in a pass
LONG = 1 << 16  # tokens of the prompt for which kernels are loaded that no pass at the start launches


@dataclass(frozen=True)
class Sizes:
    """Sizes of the state that a model's layers keep: their groups, bytes of a block of each paged group, bytes of a sequence's
    recurrent state."""

    groups: tuple[Group, ...]
    block_bytes: tuple[int, ...]
    state_bytes: int

    @classmethod
    def of(cls, plan: Plan, kind: str, drafter: Plan | None = None) -> "Sizes":
        """Return a model's sizes with keys and values in format `kind`; a drafter's are added to the group of all tokens."""
        pages = [spec for spec in plan.states if isinstance(spec, Pages)]
        windows = sorted({spec.window for spec in pages})
        of_window = [sum(block_bytes(spec, kind, plan.dtype) for spec in pages if spec.window == w) for w in windows]
        if drafter is not None:
            of_window[0] += sum(block_bytes(spec, kv.PLAIN, drafter.dtype) for spec in _pages_of(drafter))
        state = sum(state_bytes(spec, plan.dtype) for spec in plan.states if isinstance(spec, Recurrent))
        groups = [Group(w) for w in windows] + [Group(recurrent=True)] * (state > 0)
        return cls(tuple(groups), tuple(of_window), state)

    def blocks(self, n: int, most: int, longest: int) -> list[int]:
        """Return each paged group's blocks if groups of all tokens have n, for `most` sequences of up to `longest` tokens."""
        paged = [g for g in self.groups if not g.recurrent]
        return [min(n, 1 + most * g.blocks(longest, BLOCK, PIECE)) if g.window else n for g in paged]

    def bytes(self, blocks: Sequence[int]) -> int:
        """Return the bytes of these numbers of blocks of each group."""
        return sum(n * each for n, each in zip(blocks, self.block_bytes, strict=True))

    def most_blocks(self, room: int, requested: int, most: int, longest: int) -> int:
        """Return the largest n up to `requested` whose `blocks` fit into `room` bytes."""
        low, high = 0, requested
        while low < high:
            n = (low + high + 1) // 2
            low, high = (n, high) if self.bytes(self.blocks(n, most, longest)) <= room else (low, n - 1)
        return low


@dataclass(frozen=True)
class Cache:
    """An allocated cache, and the passes over it.

    blocks: number of blocks of each page group, including the null block. slots, snapshots, copies: numbers of slots of
    recurrent states. longest: max. tokens of a sequence. tokens: max. tokens in the cache. bytes: of the whole cache.
    shares: the number of blocks of each page group, then of snapshots; and the bytes of one of each. beside: bytes that passes
    take besides the cache, 0 if unknown. drafter: keys and values of a drafter's layers.
    """

    passes: ModelRunner
    groups: tuple[Group, ...]
    blocks: list[int]
    slots: int
    snapshots: int
    copies: int
    longest: int
    tokens: int
    bytes: int
    shares: tuple[list[int], list[int]]
    beside: int
    drafter: list[KeyValues]


@retried
@torch.inference_mode()
def make_cache(
    model: Any,
    plan: Plan,
    kind: str,
    most: int,
    tokens: int | None,
    fixed: bool,
    reads: int | None = None,
    most_bytes: int | None = None,
    drafts: bool = False,
    reserve: int = 0,
    drafter: Plan | None = None,
    known: Measurements | None = None,
    later: bool = False,
) -> Cache:
    """Allocate a cache in format `kind` for `most` sequences at once, of at most `tokens` tokens and `most_bytes` bytes.

    reads: total prompt tokens to come, if known. drafts: whether passes check drafts. reserve: bytes of host memory that are
    reserved for other uses. drafter: the plan of a drafter, whose keys and values are stored in blocks with the numbers of
    those of layers that see all tokens. known: the measurements of an earlier load, which replace those of trial passes. later:
    passes are recorded and timed later, so that no trial pass is run where the cache leaves room for any.

    Raises DoesNotFitError where the device has no room.
    """
    device, sizes, longest = plan.device, Sizes.of(plan, kind, drafter), context_limit(model) or NO_LIMIT
    slots, snapshots = (most, 0 if fixed else SNAPSHOTS * most) if sizes.state_bytes else (0, 0)
    copies = COPIES if drafts and sizes.state_bytes and not fixed else 0
    states = sizes.state_bytes * (slots + snapshots + copies + 1)
    n = 1 + -(-min(tokens or most * longest, most * longest) // BLOCK)
    try:
        token_budget, beside, room = None, 0 if known is None else known.beside, memory.available_memory()
        room = None if room is None else room - reserve
        wanted = min([states + sizes.bytes(sizes.blocks(n, most, longest)), *([] if most_bytes is None else [most_bytes])])
        untried = device.type == "cuda" and (later or reads is not None)
        free = torch.cuda.mem_get_info(device)[0] if untried else 0
        little = untried and wanted <= max(LITTLE * free, (free - ROOM) * later)
        if device.type == "cuda":
            if not (little or beside):
                beside, token_budget = _trial(plan, kind, most, longest, fixed)
            room = None if little else _free() - beside
        rooms = [] if room is None else [int(room * SHARE[device.type])]
        rooms += [] if most_bytes is None else [most_bytes]
        if rooms:
            n = sizes.most_blocks(min(rooms) - states, n, most, longest)
        if n < LEAST:
            raise DoesNotFitError(f"{device} has no room for a cache; take fewer bits, or a device with more memory")
        blocks = sizes.blocks(n, most, longest)
        paged = [g for g in sizes.groups if not g.recurrent]
        longest = min([longest, *(g.longest(b, BLOCK, longest) for g, b in zip(paged, blocks, strict=True))])
        passes = _runner(plan, kind, most, longest, blocks, slots + snapshots + copies, fixed)
        passes.token_budget = token_budget or passes.token_budget
        passes.token_budget.known |= {} if known is None else known.passes
        if little and known is None:
            passes.rows.flush()
            launch_all(launches(passes, reads), lambda n, of: None)
            if later:  # gives the threads' tensors back: no recording without a pool does that, and other models may need it
                empty_cache()
        cache_bytes = states + sizes.bytes(blocks)
        shares = [*blocks, snapshots], [*sizes.block_bytes, sizes.state_bytes]
        beside_it = [] if drafter is None else [_held(drafter, kv.PLAIN, blocks[0], spec) for spec in _pages_of(drafter)]
        for cache in (one for both in beside_it for one in both if one is not None):
            kv.part(cache, slice(None)).zero_()  # it may read rows that it has not written, where it did not read a prefix
        drafter_cache = [KeyValues(*both, passes.rows.tables[0]) for both in beside_it]
        numbers = (slots, snapshots, copies, longest, (n - 1) * BLOCK, cache_bytes)
        return Cache(passes, sizes.groups, blocks, *numbers, shares, beside, drafter_cache)
    except torch.OutOfMemoryError as e:
        raise DoesNotFitError(f"{device} has no room to serve this model; take fewer bits, or fewer texts at once") from e


def _runner(plan: Plan, kind: str, most: int, longest: int, blocks: Sequence[int], slots: int, fixed: bool) -> ModelRunner:
    width = -(-longest // BLOCK) + 1  # one more column stays empty: a step past a sequence's end writes to the null block
    windows = sorted({spec.window for spec in plan.states if isinstance(spec, Pages)})
    rows, state = BatchState(most + MOST_PREFILLING, [width] * len(windows), plan.device), list[KeyValues | States]()
    for spec in plan.states:
        if isinstance(spec, Recurrent):
            state.append(recurrent(spec, slots + 1, plan.dtype, plan.device))
            continue
        group = windows.index(spec.window)
        state.append(KeyValues(*_held(plan, kind, blocks[group], spec), rows.tables[group]))
    return ModelRunner(plan, rows, most, state, width * BLOCK, fixed)


def _pages_of(plan: Plan) -> list[Pages]:
    return [spec for spec in plan.states if isinstance(spec, Pages)]


def _held(plan: Plan, kind: str, blocks: int, spec: Pages) -> tuple[kv.Cache, kv.Cache | None]:
    """Return `blocks` blocks of one layer's keys, and of its values unless these are the first columns of the keys."""
    k = _pages(plan, kind, blocks, spec.heads, spec.k_dim)
    return k, _pages(plan, kind, blocks, spec.heads, spec.v_dim) if spec.v_dim else None


def _pages(plan: Plan, kind: str, blocks: int, heads: int, D: int) -> kv.Cache:
    make = partial(kv.empty, kind, dtype=plan.dtype, device=plan.device)
    # on a CPU, blocks with consecutive numbers are contiguous in memory: attention then reads them without a copy
    by_head = plan.device.type != "cuda"
    cache = make((heads, blocks, BLOCK, D)).transpose(0, 1) if by_head else make((blocks, heads, BLOCK, D))
    kv.part(cache, slice(0, 1)).zero_()
    return cache


def trial_runner(plan: Plan, kind: str, most: int, longest: int, fixed: bool) -> ModelRunner:
    """Return passes over a cache of two blocks, one of them the null block."""
    groups = len({spec.window for spec in plan.states if isinstance(spec, Pages)})
    passes = _runner(plan, kind, most, longest, [LEAST] * groups, 0, fixed)
    passes.rows.flush()
    return passes


def launches(trial: ModelRunner, reads: int | None = None) -> list[Callable[[], object]]:
    """Return one launch of each kernel of the passes of every size, or of the sizes for `reads` prompt tokens in all."""
    sizes = trial.sizes
    largest = next((t for t in sizes.totals if reads is not None and t >= reads + sizes.riding(sizes.most)), sizes.totals[-1])
    rows = {*sizes.steps, *(t for t in sizes.totals if t <= largest)}
    work = [*products(trial.plan.linears, trial.plan.dtype, rows), *_long_prompts(trial)]
    return [*work, *(partial(trial.forward, s, s, None, 0, adapted=kind) for s in sizes.steps for kind in sizes.kinds)]


def _long_prompts(trial: ModelRunner) -> list[Callable[[], object]]:
    """Return what loads the kernels that attend to long prompts under `--act fp8`: a pass without sequences launches others."""
    plan, units, work = trial.plan, min(trial.slots, LONG) // TILE, list[Callable[[], object]]()
    states = ((s.heads.D, trial.state[s.index]) for s in plan.steps if isinstance(s, Attend) and s.rounds)
    on = plan.dtype, plan.device.type, gpu.capability(plan.device)
    for D, kind in {(D, kv.kind_of(one.k)) for D, one in states if isinstance(one, KeyValues)}:
        call = PromptCall(PIECE, D, BLOCK, kind, *on, act="fp8", units=units)
        found = find(call)
        work += [partial(found[0].load, call, plan.device)] if found and found[0].load else []
    return work


def _free() -> int:
    """Return the bytes of a GPU that are free or that torch holds for later tensors."""
    free: int = torch.cuda.mem_get_info()[0]
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _trial(plan: Plan, kind: str, most: int, longest: int, fixed: bool) -> tuple[int, TokenBudget]:
    """Return the bytes that passes take besides the cache, and the times of passes; also compiles the kernels of all passes."""
    trial = trial_runner(plan, kind, most, longest, fixed)
    launch_all(launches(trial), lambda n, of: None)
    wait(plan.device)  # for what those threads launched
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for key in trial.sizes.timed:
        if key not in trial.sizes.keys:  # the others are timed when they are recorded
            trial.measure(*key)
    return torch.cuda.max_memory_allocated() - before + trial.graph_bytes() + BESIDE, trial.token_budget
