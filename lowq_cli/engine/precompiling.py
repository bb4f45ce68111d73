"""Compile the kernels of a generation in parallel, before its first token.

A kernel is compiled by launching it once, on zeros, in a separate thread: NVRTC and most of Triton's compiler release the
interpreter's lock. Only the kernels for this decoder, batch and prompt are launched; if all of them are in the caches on
disk, that takes some milliseconds and no progress is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lowq_cli.engine import explain, folding
from lowq_cli.engine import steps as s
from lowq_cli.engine.batch import Batch, KeyValues, Rectangle
from lowq_cli.engine.drafts.drafting import WIDTHS
from lowq_cli.engine.native import NativeDecoder, prompt_passes
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.state import state_of_layer
from lowq_kernels.decode.attend import LONG
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.dispatch.precompile import launch_all
from lowq_kernels.modules import dense
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.arch.parts import Recurrent

SLOTS = 64  # slots of the caches on which attention is compiled; from LONG slots on it is a different instance


def warm(
    model: Any,
    decoder: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    done: Callable[[int, int], None] = lambda n, of: None,
) -> int:
    """Compile in parallel the kernels that this decoder has not launched yet; returns the number of launches, 0 on a CPU.

    A generation calls it before it reads its prompts, so that a new batch size or prompt length waits for the slowest kernel
    only, instead of for one kernel after another. `done(n, of)` reports progress where compiling is slow.
    """
    if model.device.type != "cuda" or not prompts:
        return 0
    met = _met.setdefault(decoder, set())
    work = launches(model, decoder, len(prompts), max(map(len, prompts)), sampling, met)
    return launch_all(work, done) if work else 0


def warm_texts(model: Any, decoder: NativeDecoder, rows: int) -> int:
    """As `warm`, for the logits of whole sequences with `rows` tokens at a time, without reporting progress."""
    if model.device.type != "cuda":
        return 0
    steps = step_launches(decoder.plan, decoder.plan.program(rows), rows, decoder.kv, True)
    work = [*products(decoder.linears, model.dtype, {rows}), *steps]
    return launch_all(work, lambda n, of: None)


_met: WeakKeyDictionary[Any, set[object]] = WeakKeyDictionary()  # decoder -> row counts and steps launched for it


def launches(
    model: Any, decoder: Any, batch: int, longest: int, sampling: Sampling, met: set[object] | None = None
) -> list[Callable[[], object]]:
    """One launch of each kernel for `batch` prompts of up to `longest` tokens and for the steps after them.

    met: row counts and steps that are already launched; they are left out, and the new ones are added.
    """
    met = set() if met is None else met
    rows = {batch} | {
        (some.stop - some.start) * (tokens.stop - tokens.start) for some, tokens in prompt_passes(batch, 0, longest)
    }
    step, new = (batch, replace(sampling, seed=0)), rows - met
    work = [*products(explain.called(model, decoder), model.dtype, new)]
    if isinstance(decoder, NativeDecoder) and step not in met:
        work += launches_between_products(decoder, batch, new, sampling)
    if isinstance(decoder, NativeDecoder) and decoder.drafts and not decoder.records_aside and "drafts" not in met:
        work += [one for T in WIDTHS["cuda"] for one in checks(decoder, T)]
        met.add("drafts")
    met |= {*rows, step}
    return work


def products(linears: nn.Module, dtype: torch.dtype, rows: set[int]) -> Iterator[Callable[[], object]]:
    """One launch for each distinct matmul and row count: a step has one row per sequence, a prompt one per token."""
    seen = set()
    for layer in linears.modules():
        if isinstance(layer, QuantLinear | nn.Linear):
            shape = (layer.out_features, layer.in_features, _compiled_for(layer), layer.bias is None)
            for M in rows:
                if (M, shape) not in seen and (M <= dense.MOST_ROWS or not isinstance(layer, nn.Linear)):
                    seen.add((M, shape))
                    yield partial(_multiply, layer, M, dtype)


def _compiled_for(layer: QuantLinear | nn.Linear) -> tuple[object, ...]:
    if isinstance(layer, QuantLinear):
        return layer.scheme, layer.layout, layer.kernel, layer.in_blocks and layer.act
    return (layer.weight.dtype,)


def _multiply(layer: QuantLinear | nn.Linear, M: int, dtype: torch.dtype) -> None:
    dense.linear(layer, torch.zeros(M, layer.in_features, dtype=dtype, device=layer.weight.device))


def launches_between_products(
    decoder: NativeDecoder, batch: int, rows: set[int], sampling: Sampling
) -> list[Callable[[], object]]:
    """One launch for each kernel between the matmuls of a step, and for a mixture's layer."""
    plan, kind = decoder.plan, decoder.kv

    def choose(advance: int) -> None:
        logits = torch.zeros(batch, plan.vocabulary, dtype=plan.dtype, device=plan.device)
        token = torch.zeros(batch, dtype=torch.int64, device=plan.device)
        pos, seed = token.to(torch.int32), token[:1].clone()
        plan.ops.choose(logits, token, pos, seed, sampling.temperature, advance)

    work: list[Callable[[], object]] = [partial(choose, 0), partial(choose, 1)]
    work += step_launches(plan, plan.program(batch), batch, kind, False)
    work += step_launches(plan, plan.steps, 1, kind, False, lambda step: isinstance(step, s.Attend), LONG)
    work += step_launches(plan, plan.steps, batch, kind, True, lambda step: bool(step.state))
    for M in rows - {batch}:
        work += step_launches(
            plan, plan.program(M), M, kind, False, lambda step: isinstance(step, s.Experts | folding.GateProduct)
        )
    return work


def checks(decoder: NativeDecoder, T: int) -> Iterator[Callable[[], object]]:
    """One launch of each kernel of a step that checks drafts in T rows of one sequence."""
    plan, of_state = decoder.plan, lambda step: bool(step.state)
    yield from products(decoder.linears, decoder.dtype, {T})
    yield from step_launches(plan, plan.program(T), T, decoder.kv, False, lambda step: not of_state(step))
    recurrent = any(isinstance(spec, Recurrent) for spec in plan.states)
    for slots in () if recurrent else (SLOTS, LONG):  # recurrent layers take the rows of a sequence one by one
        yield from step_launches(plan, plan.steps, T, decoder.kv, False, of_state, slots, drafted=True)
    yield partial(_accept, plan, T)


def _accept(plan: Plan, T: int) -> None:
    """Draw a token after each of T rows, and count the right drafts."""
    token, pos, seed = (torch.zeros(T, dtype=d, device=plan.device) for d in (torch.int64, torch.int32, torch.int64))
    rows, one = torch.arange(T, dtype=torch.int32, device=plan.device), torch.zeros(1, dtype=torch.int64, device=plan.device)
    logits = torch.zeros(T, plan.vocabulary, dtype=plan.dtype, device=plan.device)
    plan.ops.choose_rows(logits, rows, token, pos.clone(), seed, torch.zeros(T, device=plan.device))
    plan.ops.accept(token, token.clone(), one, one + T, one, one.clone(), pos[:1].clone(), one.clone())
    torch.add(rows, pos[:1], out=pos.clone())
    logits.index_select(0, one)


def step_launches(
    plan: Plan,
    steps: Sequence[s.Step],
    M: int,
    kind: str,
    prompt: bool,
    asked: Callable[[s.Step], bool] = lambda step: True,
    slots: int = SLOTS,
    drafted: bool = False,
) -> Iterator[Callable[[], object]]:
    """One launch of each distinct step for which `asked` is true, for M sequences, with `prompt` for a prompt of M tokens, or
    with `drafted` for M rows of one sequence.

    Products are left out, and mixtures with so many rows that the host chooses their kernels.
    """
    seen, width, route = set(), plan.model.hidden, None
    for step in steps:
        key = (type(step), width, *step.compiled_for())
        by_host = isinstance(step, s.Experts) and M > FEW_TOKENS and not step.experts.grouped(plan.dtype)
        if asked(step) and not isinstance(step, s.Product) and key not in seen and not by_host:
            seen.add(key)
            yield partial(_run, plan, step, M, width, kind, prompt, slots, route, drafted)
        route = (step, width) if isinstance(step, s.Route) else route
        width = step.width(width)


def _run(
    plan: Plan,
    step: s.Step,
    M: int,
    width: int,
    kind: str,
    prompt: bool,
    slots: int,
    route: tuple[s.Route, int] | None,
    drafted: bool,
) -> None:
    """Run one step on zeros; experts after their router. route: the router, and the width of its y."""
    make, texts = partial(torch.zeros, dtype=plan.dtype, device=plan.device), 1 if prompt else M
    ids, pos = (torch.zeros(M, dtype=d, device=plan.device) for d in (torch.int64, torch.int32))
    there = Rectangle(slice(0, 1), 0, M, [M], 1) if prompt else None
    angles = plan.angles(max(slots, M if prompt else 0), plan.device)
    batch = Batch(plan.ops, ids, 0 if prompt else M, pos[:texts], angles, ids[:texts] + 1, rectangle=there, tile=plan.tile)
    states = {i: state_of_layer(plan, i, texts, max(slots, M if prompt else 0), kind) for i in step.state}
    if drafted:
        first, tables = ids[:1], ids[:M, None].to(torch.int32)
        batch = replace(batch, drafted=True, groups=(first, first + M, M))
        states = {i: KeyValues(one.k, one.v, tables) for i, one in states.items() if isinstance(one, KeyValues)}
    frame = s.Frame(make(M, plan.model.hidden), batch, states)  # type: ignore[arg-type]  # a dict: the step reads only its own entries
    if isinstance(step, s.Experts) and route is not None:
        frame.y = make(M, route[1])
        route[0].run(frame)
    frame.y = make(M, width)
    frame.kept |= {name: make(M, values) for name, values in step.reads(width).items()}
    frame.kept |= folding.blank(step, plan.ops, M, plan.dtype, plan.device)
    step.run(frame)
