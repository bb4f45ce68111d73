"""LoRA adapters of a plan: every product that an adapter changes adds the low-rank factors of each row's adapter.

The packed weights do not change, and a plan can have any number of adapters. `Batch.adapters` selects the adapter of each row,
`Adapters.all` that of all rows.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from lowq_cli.engine import steps as s
from lowq_cli.engine.lora_product import Adapters, LoraProduct
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.plan import Plan
from lowq_cli.files.adapter import Adapter
from lowq_kernels.decode.low_rank_factors import LowRank
from lowq_packers.arch.parts import Linear
from lowq_packers.errors import UnsupportedError

Factors = tuple[torch.Tensor, torch.Tensor]
LEAST_RANK = 16  # factors are zero-padded to this rank, the size that a tensor core multiplies


def adapt(plan: Plan, given: Sequence[Adapter]) -> Adapters:
    """Set a plan's adapters. Raises UnsupportedError for an adapter of a module that is not a product of the plan."""
    adapters = Adapters([a.name for a in given], [a.digest for a in given])
    factors_of = [placed(plan, a) for a in given]

    def step_of(step: s.Step) -> s.Step:
        if not isinstance(step, s.Product) or step.part is None:
            return step
        factors = _stack(step.part, factors_of, plan)
        return step if factors is None else LoraProduct(step, factors, adapters)

    plan.rewrite(step_of)
    plan.adapters = adapters
    return adapters


def placed(plan: Plan, adapter: Adapter) -> dict[str, Factors]:
    """Its factors by the plan's names. Raises UnsupportedError unless each is of a product of the plan, of its shape."""
    parts = [step.part for step in plan.steps if isinstance(step, s.Product) and step.part is not None]
    shapes = {name: (N, part.columns) for part in parts for name, N in zip(part.parts, part.rows, strict=True)}
    result: dict[str, Factors] = {}
    for module, (A, B) in sorted(adapter.factors.items()):
        words = module.split(".")
        name = next((n for i in range(len(words)) if (n := ".".join(words[i:])) in shapes), None)
        if name is None or name in result:
            line = f"the adapter {adapter.name} changes {module}, which is not a separate matrix product in this model"
            raise UnsupportedError(f"{line}; if it is of this model, merge it into the base (peft: merge_and_unload)")
        N, K = shapes[name]
        if (B.shape[0], A.shape[1]) != (N, K):
            line = f"the adapter {adapter.name} is of another model: {module} is {N} x {K} in this one"
            raise UnsupportedError(f"{line}, not {B.shape[0]} x {A.shape[1]}")
        result[name] = A, B
    return result


def _stack(part: Linear, given: Sequence[dict[str, Factors]], plan: Plan) -> LowRank | None:
    """The factors of all adapters for a product; None where no adapter changes it."""
    numbered = [(number, p, factors) for number, factors in enumerate(given, 1) for p in range(len(part.parts))]
    each = {(number, p): factors[part.parts[p]] for number, p, factors in numbered if part.parts[p] in factors}
    if not each:
        return None
    R = max(LEAST_RANK, 1 << (max(A.shape[0] for A, _ in each.values()) - 1).bit_length())
    ends = tuple(accumulate(part.rows))
    all_A = torch.zeros(len(given) + 1, len(ends), R, part.columns)
    all_B = torch.zeros(len(given) + 1, ends[-1], R)
    for (number, p), (A, B) in each.items():
        all_A[number, p, : A.shape[0]], all_B[number, ends[p] - part.rows[p] : ends[p], : A.shape[0]] = A, B
    return LowRank.of(all_A.to(plan.device, plan.dtype), all_B.to(plan.device, plan.dtype), ends)


def attach(model: Any, given: Sequence[Adapter]) -> None:
    """Make a loaded model compute with an adapter, both in `engine.stream` and in its forward.

    Raises UnsupportedError for a model that the native decoder cannot run.
    """
    from lowq_cli.engine import plan as plans

    if reason := plans.why_not(model):
        raise UnsupportedError(f"adapters need lowq's own decoder, which does not support this model: {reason}")
    _adapt_all(plans.plan_of(model), given)
    owned(model).adapt = partial(_adapt_all, given=given)
    for name, module in model.named_modules():
        for adapter in given[:1]:
            if (own := next((m for m in adapter.factors if name and (m == name or m.endswith(f".{name}"))), None)) is not None:
                _hook(module, *adapter.factors[own], model)


def _adapt_all(plan: Plan, given: Sequence[Adapter]) -> None:
    adapt(plan, given).all = 1


def _hook(module: nn.Module, A: torch.Tensor, B: torch.Tensor, model: Any) -> None:
    factors = [t.to(model.device, model.dtype) for t in (A, B)]

    def add(_: nn.Module, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        A, B = (t.to(out.device, out.dtype) for t in factors)  # where the model was moved since
        return out + (given[0] @ A.T) @ B.T

    module.register_forward_hook(add)
