"""A model as the few tensors that decoding needs: per layer one q/k/v weight, o, one gate/up weight, down.

In a mixture the last two are the router and the packed experts. What a family does otherwise than Llama is data
(`lowq_packers.families`). The tensors come from a transformers model (`blocks_of`: its layers become views into the joined
weights, so nothing is held twice, and it keeps working) or straight from files (`light.py`).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lowq_cli.engine import rope
from lowq_cli.files.family_config import ACTS
from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.decode.reference import Heads
from lowq_kernels.modules.joined import dense, join
from lowq_packers.errors import DamagedError
from lowq_packers.families import Family, families

FULL, SLIDING = "full_attention", "sliding_attention"  # of a config's layer_types


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight (H,), with Gemma's 1 + w already added, and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Mlp:
    """down(act(gate x) * up x), gate and up as one layer."""

    gate_up: nn.Module
    down: nn.Module


@dataclass(frozen=True)
class Mixture:
    """The sum over a token's top_k experts, weighted as `reference.route` says. router (E, H), bias (E,) or None."""

    router: torch.Tensor
    experts: QuantExperts
    top_k: int
    normalise: bool
    rounded: bool
    bias: torch.Tensor | None = None

    @property
    def route(self) -> tuple[torch.Tensor, int, bool, bool, torch.Tensor | None]:
        """What `reference.route` takes after x."""
        return self.router, self.top_k, self.normalise, self.rounded, self.bias


@dataclass(frozen=True)
class Layer:
    """One decoder layer. post_attention and post_mlp norm what is added to the residual, or are None."""

    qkv: nn.Module
    o: nn.Module
    mlp: Mlp | Mixture
    heads: Heads
    rope: str
    before_attention: Norm
    before_mlp: Norm
    post_attention: torch.Tensor | None
    post_mlp: torch.Tensor | None


class Tensors(Protocol):
    """Where `Blocks` gets a model's weights from, by the names of its layers' modules."""

    def linear(self, parent: str, names: tuple[str, ...]) -> nn.Module:
        """The layers `names` of a module as one, along N."""
        ...

    def vector(self, name: str, leaf: str = "weight") -> torch.Tensor:
        """A norm's weight, or another parameter of a module."""
        ...

    def experts(self, parent: str) -> tuple[torch.Tensor, QuantExperts] | None:
        """A layer's router (E, H) and experts; None where it has an MLP."""
        ...


class Blocks:
    """What `FusedDecoder` reads. `linears` holds the weights under short names, for `--explain`."""

    def __init__(self, config: Any, family: Family, tensors: Tensors, embed: nn.Module, head: Any) -> None:
        self.config, self.family, self.embed, self.head = config, family, embed, head
        self.layers = [_layer(tensors, i, config, family) for i in range(config.num_hidden_layers)]
        self.norm = _norm(tensors, "model.norm", config, family)
        self.softcap = config.final_logit_softcapping if family.soft_capped else None
        self.act = ACTS[getattr(config, family.activation)]
        named = nn.ModuleList(_named(layer) for layer in self.layers)
        self.linears = nn.ModuleDict({"layers": named, "head": self.head})

    @property
    def rotations(self) -> dict[str, rope.Rotation]:
        """Kind of layer -> how it turns its heads."""
        kinds, D, limit = rope.by_kind(self.config.rope_parameters), self.layers[0].heads.D, self.config.max_position_embeddings
        return {k: rope.Rotation(kinds[k], D, limit, self.family.partial_rope) for k in {layer.rope for layer in self.layers}}

    def rope_tables(
        self, slots: int, device: torch.device, dtype: torch.dtype, length: int | None = None
    ) -> dict[str, rope.Tables]:
        """Kind of layer -> cos, sin (slots, R), as transformers rounds them, for a text of that length (`Rotation.tables`)."""
        return {kind: r.tables(slots, device, dtype, length) for kind, r in self.rotations.items()}


class _ModelTensors:
    """The modules of a transformers model, joined in place."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def linear(self, parent: str, names: tuple[str, ...]) -> nn.Module:
        module = self.model.get_submodule(parent)
        if len(names) > 1:
            return join(module, names)
        only = getattr(module, names[0])
        return dense(only.weight.detach(), only.bias) if type(only) is nn.Linear else only

    def vector(self, name: str, leaf: str = "weight") -> torch.Tensor:
        return getattr(self.model.get_submodule(name), leaf).detach()

    def experts(self, parent: str) -> tuple[torch.Tensor, QuantExperts] | None:
        mlp = self.model.get_submodule(parent)
        mixture = families()[self.model.config.get_text_config().model_type].mixture
        if mixture is None or not hasattr(mlp, "experts"):
            return None
        return getattr(mlp, mixture.router).weight.detach(), mlp.experts


def blocks_of(model: Any) -> Blocks:
    """The blocks of a model that `why_not` has nothing against: its own, or those of a transformers model, joined in place."""
    if isinstance(found := getattr(model, "blocks", None), Blocks):
        return found
    config = model.config.get_text_config()
    return Blocks(config, families()[config.model_type], _ModelTensors(model), model.model.embed_tokens, model.lm_head)


def why_not(model: Any) -> str | None:
    """The reason this model cannot be decoded from `Blocks`, or None."""
    if isinstance(getattr(model, "blocks", None), Blocks):
        return None
    config = model.config.get_text_config()
    if reason := why_not_config(config):
        return reason
    base = getattr(model, "model", None)
    wanted = ("layers", "embed_tokens", "norm", "rotary_emb")
    if base is None or not all(hasattr(base, name) for name in wanted) or not hasattr(model, "lm_head"):
        return f"{type(model).__name__} is not built like the causal models of its family"
    if len({p.device for p in model.parameters()}) > 1:
        return "the model is spread over several devices"
    routed = [layer.mlp for layer in base.layers if hasattr(getattr(layer, "mlp", None), "experts")]
    if not all(isinstance(mlp.experts, QuantExperts) for mlp in routed):
        return "experts that are not packed"
    if any(hasattr(m, "_hf_hook") for m in model.modules()):
        return "hooks of accelerate sit on its modules"
    return None


def why_not_config(config: Any) -> str | None:
    """The reason no model of this config can be, or None."""
    kind = getattr(type(config), "model_type", config.model_type)  # Ministral's may be called mistral
    if kind not in families():
        return f"{kind} is not one of the families with fused layers ({', '.join(families())})"
    if (act := getattr(config, families()[kind].activation)) not in ACTS:
        return f"activation {act}"
    if reason := rope.why_not(getattr(config, "rope_parameters", None), families()[kind].rope_by_layer_type):
        return reason
    if getattr(config, "attn_logit_softcapping", None):
        return "soft-capped attention"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "attention that is not causal"
    return None


def head_dim(config: Any) -> int:
    """Values of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _scaled(weight: torch.Tensor, family: Family) -> torch.Tensor:
    return 1.0 + weight.float() if family.norm_adds_one else weight  # fp32: 1 + w is what it computes, bf16 would round it


def _norm(tensors: Tensors, name: str, config: Any, family: Family) -> Norm:
    return Norm(_scaled(tensors.vector(name), family), float(config.rms_norm_eps))


def _window(index: int, config: Any, family: Family) -> int:
    windowed = family.windows == "every layer"
    if family.windows == "by layer_types":
        windowed = config.layer_types[index] == SLIDING
    window = int(getattr(config, "sliding_window", None) or 0) if windowed else 0
    if window < 0:
        raise DamagedError(f"config.json has sliding_window = {window}; it cannot be negative")
    return window


def _layer(tensors: Tensors, index: int, config: Any, family: Family) -> Layer:
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    D, of_heads = head_dim(config), [f"{attention}.{n}_norm" if family.qk_norm else "" for n in "qk"]
    q_norm, k_norm = (_scaled(tensors.vector(n), family) if n else None for n in of_heads)
    heads = Heads(
        config.num_attention_heads,
        config.num_key_value_heads,
        D,
        float(getattr(config, family.attention_scale) if family.attention_scale else D) ** -0.5,
        _window(index, config, family),
        float(config.rms_norm_eps) if family.qk_norm else 0.0,
        q_norm,
        k_norm,
        tensors.vector(attention, "sinks").float() if family.sinks else None,
    )
    after = "post_attention_layernorm"  # where nothing norms what is added, the norm before the MLP
    posts = (after, "post_feedforward_layernorm") if family.post_norms else ()
    post = [_scaled(tensors.vector(f"{layer}.{n}"), family) for n in posts]
    routed = tensors.experts(mlp) if family.mixture else None
    plain = () if routed else (tensors.linear(mlp, family.gate_up), tensors.linear(mlp, ("down_proj",)))
    return Layer(
        qkv=tensors.linear(attention, family.qkv),
        o=tensors.linear(attention, ("o_proj",)),
        mlp=_mixture(*routed, mlp, tensors, config, family) if routed else Mlp(*plain),
        heads=heads,
        rope=config.layer_types[index] if family.rope_by_layer_type else "",
        before_attention=_norm(tensors, f"{layer}.input_layernorm", config, family),
        before_mlp=_norm(tensors, f"{layer}.{'pre_feedforward_layernorm' if posts else after}", config, family),
        post_attention=post[0] if post else None,
        post_mlp=post[1] if post else None,
    )


def _mixture(
    router: torch.Tensor, experts: QuantExperts, parent: str, tensors: Tensors, config: Any, family: Family
) -> Mixture:
    mixture = family.mixture
    assert mixture
    always = mixture.normalises
    normalise, rounded = always or bool(config.norm_topk_prob), mixture.rounded or not always
    bias = tensors.vector(f"{parent}.{mixture.router}", "bias") if mixture.router_bias else None
    return Mixture(router, experts, int(config.num_experts_per_tok), normalise, rounded, bias)


def _named(layer: Layer) -> nn.ModuleDict:
    mlp = layer.mlp
    own = {"gate_up": mlp.gate_up, "down": mlp.down} if isinstance(mlp, Mlp) else {"experts": mlp.experts}
    return nn.ModuleDict({"qkv": layer.qkv, "o": layer.o, **own})
