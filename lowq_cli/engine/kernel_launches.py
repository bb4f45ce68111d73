"""Launches of a model's kernels on zeros: of each product, and of each step between products, once for each instance."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowq_cli.engine import folding
from lowq_cli.engine import steps as s
from lowq_cli.engine.batch import Batch, KeyValues, Rectangle
from lowq_cli.engine.drafts.drafter import Angles
from lowq_cli.engine.expert_steps import Experts, Route
from lowq_cli.engine.plan import Plan
from lowq_cli.engine.state import state_of_layer
from lowq_kernels.decode.attend import LONG
from lowq_kernels.decode.mixture import FEW_TOKENS
from lowq_kernels.modules import dense
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.arch.parts import Recurrent

SLOTS = 64  # slots of the caches on which attention is compiled; from LONG slots on it is a different instance


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


def checks(
    decoder: Any, T: int, slots: Sequence[int] = (SLOTS, LONG), angles: Angles | None = None
) -> Iterator[Callable[[], object]]:
    """One launch of each kernel of a step of a static decoder that checks drafts in T rows of one sequence.

    slots: those of the caches to compile attention for. angles: tables of the plan for at least as many slots; None: they are
    made, for which the host waits for the device.
    """
    plan, of_state = decoder.plan, lambda step: bool(step.state)
    yield from products(decoder.linears, decoder.dtype, {T})
    yield from step_launches(plan, plan.program(T), T, decoder.kv, False, lambda step: not of_state(step), angles=angles)
    recurrent = any(isinstance(spec, Recurrent) for spec in plan.states)
    for n in () if recurrent else slots:  # recurrent layers take the rows of a sequence one by one
        yield from step_launches(plan, plan.steps, T, decoder.kv, False, of_state, n, True, angles)
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
    angles: Angles | None = None,
) -> Iterator[Callable[[], object]]:
    """One launch of each distinct step for which `asked` is true, for M sequences, with `prompt` for a prompt of M tokens, or
    with `drafted` for M rows of one sequence.

    Products are left out, and mixtures with so many rows that the host chooses their kernels.
    """
    seen, width, route = set(), plan.model.hidden, None
    for step in steps:
        key = (type(step), width, *step.compiled_for())
        by_host = isinstance(step, Experts) and M > FEW_TOKENS and not step.experts.grouped(plan.dtype)
        if asked(step) and not isinstance(step, s.Product) and key not in seen and not by_host:
            seen.add(key)
            yield partial(_run, plan, step, M, width, kind, prompt, slots, route, drafted, angles)
        route = (step, width) if isinstance(step, Route) else route
        width = step.width(width)


def _run(
    plan: Plan,
    step: s.Step,
    M: int,
    width: int,
    kind: str,
    prompt: bool,
    slots: int,
    route: tuple[Route, int] | None,
    drafted: bool,
    angles: Angles | None,
) -> None:
    """Run one step on zeros; experts after their router. route: the router, and the width of its y."""
    make, texts = partial(torch.zeros, dtype=plan.dtype, device=plan.device), 1 if prompt else M
    ids, pos = (torch.zeros(M, dtype=d, device=plan.device) for d in (torch.int64, torch.int32))
    there = Rectangle(slice(0, 1), 0, M, [M], 1) if prompt else None
    angles = angles or plan.angles(max(slots, M if prompt else 0), plan.device)
    batch = Batch(plan.ops, ids, 0 if prompt else M, pos[:texts], angles, ids[:texts] + 1, rectangle=there, tile=plan.tile)
    of = 1 if drafted else texts  # caches
    states = {i: state_of_layer(plan, i, of, max(slots, M if prompt else 0), kind) for i in step.state}
    if drafted:
        first, tables = ids[:1], ids[:M, None].to(torch.int32)
        batch = replace(batch, drafted=True, groups=(first, first + M, M))
        states = {i: KeyValues(one.k, one.v, tables) for i, one in states.items() if isinstance(one, KeyValues)}
    frame = s.Frame(make(M, plan.model.hidden), batch, states)  # type: ignore[arg-type]  # a dict: the step reads only its own entries
    if isinstance(step, Experts) and route is not None:
        frame.y = make(M, route[1])
        route[0].run(frame)
    frame.y = make(M, width)
    frame.kept |= {name: make(M, values) for name, values in step.reads(width).items()}
    frame.kept |= folding.blank(step, plan.ops, M, plan.dtype, plan.device)
    step.run(frame)
