"""A tiny model of a described family in lowq's plan and in transformers, for comparison."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from described import model as random_model

from lowq_cli.engine import weights
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.plan import Plan
from lowq_packers.arch.parts import Model, walk


def planned(model: Any, described: Model | None = None) -> Any:
    """The model with a plan of it."""
    described = described or weights.describe(model.config)[0]
    own = weights.ModelWeights(model, described)
    plan = Plan(described, model.config.get_text_config(), own, model.device, model.dtype)
    owned(model).plan = plan
    return model


@cache
def shared_plan(name: str) -> Any:
    """The model of a name of `described` with a plan of it, for tests that change neither."""
    return planned(random_model(name))


def texts(vocabulary: int, *lengths: int, seed: int = 3) -> list[list[int]]:
    """Random token ids."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=g).tolist() for n in lengths]


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits (T, V) of a whole text."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative difference."""
    return ((found.float() - wanted).norm() / wanted.norm()).item()


FACTS: dict[str, dict[str, Any]] = {  # class of a part -> its facts, and what they are where a family does not have them
    "Norm": {"kind": "rms", "add_one": False, "bias": False, "groups": 1, "eps": 1e-6},
    "Rope": {"pairing": "halves", "of": 0},
    "Attention": {
        "window": 0, "clip": 0.0, "chunk": 0, "softcap": 0.0, "q_norm": None, "k_norm": None, "v_norm": None,
        "norm_over": "head", "norm_last": False, "gated": False, "gate": None, "order": "parts", "key_scale": 1.0, "sinks": "",
        "position_scale": None, "scale": 1.0, "rope": None,
    },
    "LatentAttention": {"scale": 1.0, "position_scale": None},
    "GatedDelta": {"grouped": False},
    "Mamba2": {"scales": (1.0,) * 5, "gate_last": False, "norm": None},
    "Mlp": {"gate_scale": 1.0, "act": "silu", "scalars": ""},
    "Router": {
        "score": "softmax", "logits_bias": False, "bias": "", "groups": (1, 1), "normalise": True, "factor": 1.0, "norm": None,
        "scale": "", "each": "", "group_score": "top2",
    },
    "Experts": {"weigh_inputs": False, "shared": None, "shared_gate": "", "latent": None},
    "Branch": {"norm": None, "post": None, "into": 1.0, "out": 1.0},
    "Update": {"post": None, "scale": 1.0, "after": ""},
    "Model": {"embed_scale": 1.0, "softcap": 0.0, "logit_scale": 1.0, "tokens": None, "embed_norm": None},
}  # fmt: skip


def without(part: Any, kind: str, fact: str) -> Any:
    """A description with one fact of one kind of part taken out wherever it is."""
    if isinstance(part, tuple):
        return tuple(without(one, kind, fact) for one in part)
    if not hasattr(part, "__dataclass_fields__"):
        return part
    part = replace(part, **{f.name: without(getattr(part, f.name), kind, fact) for f in fields(part)})
    return replace(part, **{fact: FACTS[kind][fact]}) if type(part).__name__ == kind else part


def facts_of(described: Model) -> list[tuple[str, str]]:
    """(kind of part, fact) of every fact that a description has and Llama's parts do not."""
    parts = list(walk(described))
    return [
        (kind, fact)
        for kind, row in FACTS.items()
        for fact, absent in row.items()
        if any(type(part).__name__ == kind and getattr(part, fact) != absent for part in parts)
    ]
