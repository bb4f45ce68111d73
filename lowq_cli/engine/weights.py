"""The tensors of a transformers model by the names of its description; layers that form one product are joined in place.

The model's modules become views into the joined weights, so memory holds nothing twice and the model keeps working.
`native_loader` reads the same tensors directly from files.
"""

from copy import copy
from typing import Any

import torch
from torch import nn

from lowq_cli.engine import rope
from lowq_cli.hf.embedding import embed_scale
from lowq_cli.hf.expert_kinds import kind_of
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.modules.joined import dense, join, weight_of
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.arch import Family, families
from lowq_packers.arch.common import NotDescribed
from lowq_packers.arch.parts import Experts, Linear, Model, mixers
from lowq_packers.errors import is_no_refusal

THEIR_HOOKS = ("lowq_cli.", "transformers.", "peft.")  # modules whose hooks change no output that the decoder computes


class ModelWeights:
    """The tensors of a transformers model. Raises AttributeError for a name without a module."""

    def __init__(self, model: Any, described: Model) -> None:
        self.model, self.described = model, described
        self.text = model.get_submodule(described.prefix.rstrip("."))

    def linear(self, part: Linear) -> nn.Module:
        """As `compiling.Weights` says."""
        parents = {name.rpartition(".")[0] for name in part.parts}
        assert len(parents) == 1, f"{part.parts} are of several modules"
        parent, names = self.text.get_submodule(parents.pop()), tuple(name.rpartition(".")[2] for name in part.parts)
        if len(names) > 1:
            return join(parent, names)
        only = getattr(parent, names[0])
        return dense(only.weight.detach(), only.bias) if type(only) is nn.Linear else only

    def matrix(self, part: Linear) -> torch.Tensor:
        """As `compiling.Weights` says."""
        return torch.cat([weight_of(self.text.get_submodule(name), self.model.dtype) for name in part.parts])

    def vector(self, name: str) -> torch.Tensor:
        """As `compiling.Weights` says."""
        module, _, leaf = name.rpartition(".")
        owner = self.text.get_submodule(module)
        if leaf == "weight" and isinstance(owner, QuantLinear):
            return weight_of(owner, self.model.dtype)
        return getattr(owner, leaf).detach()

    def experts(self, part: Experts) -> nn.Module:
        """As `compiling.Weights` says."""
        module = self.text.get_submodule(part.module)
        if isinstance(module, QuantExperts):
            return module
        shallow = copy(module)  # QuantExperts takes the parameters out of the copy; the model's module keeps them
        shallow._parameters = dict(module._parameters)
        return QuantExperts(shallow, {}, self.model.dtype, top_k=part.router.top_k)

    @property
    def embed(self) -> nn.Module:
        """The token embedding."""
        return self.text.get_submodule(self.described.embed)

    @property
    def head(self) -> nn.Module:
        """The output layer."""
        return self.model.get_submodule(self.described.head)


def describe(config: Any) -> tuple[Model, Family]:
    """The description of a config's model, and its family. Raises NotDescribed."""
    kind = getattr(type(config), "model_type", "") or config.model_type  # Ministral's config may say "mistral"
    if (family := families().get(kind)) is None:
        raise NotDescribed(f"{kind} is not one of the described families ({', '.join(families())})")
    text = config.get_text_config()
    if reason := rope.why_not(getattr(text, "rope_parameters", None)):
        raise NotDescribed(reason)
    if getattr(text, "use_bidirectional_attention", False) is True or not getattr(text, "is_causal", True):
        raise NotDescribed("attention that is not causal")
    return family.describe(config), family


def why_not(model: Any) -> str | None:
    """The reason why a transformers model cannot be run by its description, or None."""
    try:
        described, _ = describe(model.config)
    except NotDescribed as e:
        return str(e)
    try:
        weights = ModelWeights(model, described)
        routed = [weights.text.get_submodule(m.module) for _, m in mixers(described) if isinstance(m, Experts)]
        scale = embed_scale(weights.embed) if isinstance(weights.embed, nn.Embedding) else 1.0
        if described.norm.name:
            weights.vector(f"{described.norm.name}.weight")
        assert weights.head is not None
    except AttributeError as e:  # torch raises it for a missing module
        if is_no_refusal(e):
            raise
        return f"{type(model).__name__} is not built like the causal models of its family"
    if scale is None:
        return f"an embedding of a kind lowq does not know ({type(weights.embed).__name__})"
    if odd := next((k for m in routed if not isinstance(m, QuantExperts) and isinstance(k := kind_of(m), str)), None):
        return odd
    if len({p.device for p in model.parameters()}) > 1:
        return "the model is spread over several devices"
    for m in model.modules():
        if hasattr(m, "_hf_hook"):
            return "hooks of accelerate sit on its modules"
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()):
            if not getattr(hook, "__module__", "").startswith(THEIR_HOOKS):
                return f"{type(m).__name__} has a forward hook"
    return None
