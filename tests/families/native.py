"""A tiny model of a described family by its plan, and by transformers: what tests compare."""

from typing import Any

import torch
from tiny import build

from lowq_cli.engine import weights
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.plan import KEPT, Plan, plan_of


def planned(model: Any) -> Plan:
    """The plan of a transformers model whatever `why_not` says of unpacked experts; kept with the model."""
    described, _ = weights.describe(model.config)
    own = weights.ModelWeights(model, described)
    plan = Plan(described, model.config.get_text_config(), own, model.device, model.dtype)
    object.__setattr__(model, KEPT, plan)
    return plan_of(model)


def tiny(family: str, **more: Any) -> tuple[Any, NativeDecoder]:
    """The tiny model, and a decoder by its plan."""
    model = build(family, **more)
    planned(model)
    return model, NativeDecoder(model)


def texts(model: Any, *lengths: int, seed: int = 3) -> list[list[int]]:
    """Random token ids."""
    vocabulary = model.config.get_text_config().vocab_size
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=g).tolist() for n in lengths]


@torch.inference_mode()
def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logits (T, V) of a whole text."""
    out = model(input_ids=torch.tensor([ids]), use_cache=False)
    return out.logits[0].float()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative difference."""
    return ((found.float() - wanted).norm() / wanted.norm()).item()
