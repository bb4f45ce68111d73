"""Compile the kernels of a generation in parallel, before its first token.

A kernel is compiled by launching it once, on zeros, in a separate thread: NVRTC and most of Triton's compiler release the
interpreter's lock. Only the kernels for this decoder, batch and prompt are launched; if all of them are in the caches on
disk, that takes some milliseconds and no progress is shown.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lowq_cli.engine import explain, folding
from lowq_cli.engine.drafts.drafting import WIDTHS
from lowq_cli.engine.expert_steps import Experts
from lowq_cli.engine.kernel_launches import checks, products, step_launches
from lowq_cli.engine.mixer_steps import Attend
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.prefill import prompt_passes
from lowq_cli.engine.sampling import Sampling
from lowq_kernels.decode.attend import LONG
from lowq_kernels.dispatch.precompile import launch_all


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
    work += step_launches(plan, plan.steps, 1, kind, False, lambda step: isinstance(step, Attend), LONG)
    work += step_launches(plan, plan.steps, batch, kind, True, lambda step: bool(step.state))
    for M in rows - {batch}:
        work += step_launches(
            plan, plan.program(M), M, kind, False, lambda step: isinstance(step, Experts | folding.GateProduct)
        )
    return work
