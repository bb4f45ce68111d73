"""Every described family with a LoRA adapter on each of its products: the logits are those of the model with it merged."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from described import NAMES, here
from described import model as random_model
from native import logits_of, off, planned, texts

from lowq_cli.engine import steps as s
from lowq_cli.engine.lora import adapt
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.plan import plan_of
from lowq_cli.files.adapter import Adapter
from lowq_packers.errors import UnsupportedError

CLOSE = 1e-4  # as in test_native.py
RANK, VOCAB = 3, 160
# each kind of mixer, a shared expert, biases, joined and single projections; the others run with --all
SOME = ("llama", "phi3", "qwen2_moe", "deepseek_v3", "qwen3_next", "mamba2", "lfm2", "gpt_oss", "gemma4_text/e2b", "nemotron_h")
# linear layers that take no adapter, by the end of their names: routers, a shared expert's gate, and keys and values of latent
# attention, which is computed from latents
REFUSED = ("router", "router.proj", "router.gate", "gate.wg", "shared_expert_gate", "kv_b_proj")
CASES = [name if name in SOME else pytest.param(name, marks=pytest.mark.more) for name in NAMES]


def of_products(plan, seed):
    """An adapter of random factors for every product of a plan."""
    g = torch.Generator().manual_seed(seed)
    factors = {}
    for part in (step.part for step in plan.steps if isinstance(step, s.Product) and step.part is not None):
        for name, N in zip(part.parts, part.rows, strict=True):
            A = torch.randn(RANK, part.columns, generator=g) / part.columns**0.5
            factors[plan.model.prefix + name] = A, torch.randn(N, RANK, generator=g)
    return Adapter("a", factors, b"")


@torch.no_grad()
def merged(model, adapter):
    for name, (A, B) in adapter.factors.items():
        model.get_submodule(name).weight += B @ A
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_merged_model(name):
    """The second adapter of two, so that the number of an adapter counts; the first one's are others."""
    ours = planned(random_model(name))
    plan = plan_of(ours)
    first, second = of_products(plan, 1), of_products(plan, 2)
    assert first.factors
    adapters = adapt(plan, [first, second])
    ((*ids,),) = texts(VOCAB, 19)
    wanted = logits_of(merged(random_model(name), second), ids)
    adapters.all = 2
    assert off(NativeDecoder(ours).logits(torch.tensor([ids]))[0], wanted) < CLOSE
    adapters.all = 1
    assert off(NativeDecoder(ours).logits(torch.tensor([ids]))[0], wanted) > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_all_linear_layers_but_those_named_take_an_adapter(name):
    ours = planned(random_model(name))
    factors, layers = of_products(plan_of(ours), 1).factors, f"{plan_of(ours).model.prefix}layers."
    linear = {n for n, m in ours.named_modules() if isinstance(m, nn.Linear) and n.startswith(layers)}
    assert [n for n in sorted(linear - set(factors)) if not n.endswith(REFUSED)] == []


@pytest.mark.parametrize("name", [n for n in ("mixtral", "qwen3_next") if here(n)])
def test_adapters_of_routed_experts_are_refused_by_name(name):
    plan = plan_of(planned(random_model(name)))
    module = f"{plan.model.prefix}layers.1.mlp.experts.0.down_proj"
    with pytest.raises(UnsupportedError, match=r"experts\.0\.down_proj, which is not a separate matrix product"):
        adapt(plan, [Adapter("a", {module: (torch.zeros(2, 32), torch.zeros(64, 2))}, b"")])
