"""Layers of families' published sizes on a Hopper GPU: which of their parts no kernel takes, so that torch's definition runs.

Nothing is computed: the plan of a published config holds tensors without values, and dispatch is asked as if they were on
a GPU. PERMITTED lists what may run as a definition, with the reason.
"""

import dataclasses
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from described import COPIES
from sizes import CONFIGS

from lowq_cli.engine import expert_steps, explain, mixer_steps
from lowq_cli.engine import steps as s
from lowq_cli.engine.compiling import Compiler
from lowq_kernels import gpu
from lowq_kernels.decode import attend_prepared, elementwise, norms_triton, prepare_triton
from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.decode.attend import AttendCall
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.latent import LatentCall
from lowq_kernels.decode.mixture import ExpertsCall
from lowq_kernels.decode.prompt_call import PromptCall
from lowq_kernels.decode.route import Routing
from lowq_kernels.dispatch.registry import find, kernels
from lowq_packers.arch import families, parts
from lowq_packers.arch.names import tensors
from lowq_packers.arch.parts import Model, walk
from lowq_packers.scheme import Scheme

DTYPE, SLOTS = torch.bfloat16, 2048
HERE = tuple(name for name in CONFIGS if name.partition("/")[0] in {*CONFIG_MAPPING, *COPIES})
KERNELS = "cuda/experts" in kernels("experts")


class Shapes:
    """`compiling.Weights` without values."""

    def __init__(self, model: Model) -> None:
        self.shapes = {n.removeprefix(model.prefix): t.shape for n, t in tensors(model, "modules").items()}

    def linear(self, part: Any) -> nn.Module:
        return nn.Linear(part.columns, sum(part.rows), bias=part.bias, device="meta", dtype=DTYPE)

    def matrix(self, part: Any) -> torch.Tensor:
        return torch.empty(sum(part.rows), part.columns, device="meta", dtype=DTYPE)

    def vector(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], device="meta", dtype=DTYPE)

    def experts(self, part: Any) -> Any:
        return part

    embed = head = nn.Identity()


def config_of(name: str) -> Any:
    model_type = name.partition("/")[0]
    return CONFIG_MAPPING[COPIES.get(model_type, model_type)](**deepcopy(CONFIGS[name]))


def without_kernel(step: s.Step, width: int, rows: int, prompt: bool) -> Iterator[str]:
    """What of a step runs as torch's definition for so many rows, each a sequence's token or all of one prompt."""
    x = torch.empty(rows, width, device="meta", dtype=DTYPE)
    match step:
        case s.UpdateNorm():
            for norms in ((step.norm, step.post), *((n,) for n in step.own or ())):
                yield from _why("norm", norms_triton.refuse(x, *norms))
        case s.Normed(norm=norm) if norm is not None:
            yield from _why("norm", norms_triton.refuse(x, norm))
        case s.Gate():
            yield from _why("activation", None if step.act in elementwise.ACTS else f"activation {step.act}")
        case s.Xielu() | s.Clip() | mixer_steps.AttendBlock():
            yield type(step).__name__
        case mixer_steps.PreparedAttend() if prompt or attend_prepared.fused(step.prepare.facts, step.heads) is None:
            yield from _why("prepare", prepare_triton.refuse(step.prepare.facts))
    match step:
        case mixer_steps.Attend() if prompt:
            h = step.heads
            yield from _kernel(PromptCall(rows, h.D, 64, PLAIN, DTYPE, "cuda", gpu.HOPPER.capability, h.beyond))
        case mixer_steps.Attend():
            rope = step.prepare.rope if isinstance(step, mixer_steps.PreparedAttend) else step.rope
            yield from _kernel(AttendCall.of(x, SLOTS, rope.dims if rope else step.heads.D, step.heads, 64))
        case mixer_steps.AttendLatent() if not prompt:
            f = step.facts
            sizes = (f.heads, f.nope, f.rotated, f.v_dim, f.rank, f.pairing, f.position_scale is not None)
            yield from _kernel(LatentCall(rows, SLOTS, *sizes, DTYPE, "cuda", gpu.HOPPER.capability, 64))
        case mixer_steps.Recur():
            yield from _kernel(step.facts.call(x, prompt))
        case expert_steps.Route():
            of = Routing.of(torch.empty(rows, step.facts.weight.shape[1], device="meta", dtype=DTYPE), step.facts)
            yield from _kernel(of.call)
        case expert_steps.Experts(experts=part):
            yield from _kernel(_experts(part, rows), "grouped by the host")


def _why(what: str, why: str | None) -> Iterator[str]:
    if why:
        yield f"{what}: {why}"


def _kernel(call: Any, none: str = "no kernel") -> Iterator[str]:
    changed = {"device": "cuda", "capability": gpu.HOPPER.capability}
    chosen = find(dataclasses.replace(call, **changed))
    if chosen is None or (chosen[0].name.startswith("torch/")) or (call.op == "experts" and not chosen[0].prefers(call)):
        yield f"{call.op}: {none}"


def _experts(part: Any, rows: int) -> ExpertsCall:
    group = next(g for g in (128, 64, 32) if part.hidden % g == part.inner % g == 0)
    scheme, of_up = Scheme(4, group, "float"), 2 if part.gated else 1
    facts = ((of_up * part.inner, part.hidden, scheme, "tile"), (part.hidden, part.inner, scheme, "tile"))
    act = part.act if part.gated else UNGATED + part.act
    return ExpertsCall(rows, part.router.experts, *facts, part.router.top_k, act, DTYPE, "cuda", gpu.HOPPER.capability)


def gaps(name: str) -> set[str]:
    """ "step" or "prompt" and what of it runs as a definition."""
    c = config_of(name)
    model = families()[name.partition("/")[0]].describe(c)
    plan = Compiler(model, Shapes(model), DTYPE)
    found, width = set(), model.hidden
    for step in plan.steps:
        for kind, rows in (("step", 1), ("step", 8), ("prompt", 1000)):
            found |= {f"{kind}, {what}" for what in without_kernel(step, width, rows, kind == "prompt")}
        width = step.width(width)
    return found


PERMITTED = {"apertus": {"step, Xielu", "prompt, Xielu"}}  # five small operations; a kernel waits for its measurement


@pytest.mark.skipif(not KERNELS, reason="NVRTC is not installed, and without it our launchers do not import")
@pytest.mark.parametrize("name", HERE)
def test_operations_without_a_kernel_are_those_permitted(name):
    here = [mock.patch.object(gpu, n, return_value=gpu.HOPPER) for n in ("here", "of")]
    with here[0], here[1]:
        assert gaps(name) == PERMITTED.get(name, set())


@pytest.mark.parametrize("name", HERE)
def test_a_step_counts_the_bytes_of_a_tokens_experts(name):
    c = config_of(name)
    routers = [p.router for p in walk(families()[name.partition("/")[0]].describe(c).layers) if isinstance(p, parts.Experts)]
    share = sum(r.top_k / r.experts for r in routers) / len(routers) if routers else 1.0
    model = nn.Module()
    model.config, model.experts = c, nn.Module()
    model.experts.weight = nn.Parameter(torch.zeros(10**6, dtype=torch.uint8), requires_grad=False)
    assert explain.bytes_per_token(model, None) == pytest.approx(share * 10**6, abs=1)
