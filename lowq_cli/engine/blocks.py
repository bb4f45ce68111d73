"""A transformers model as the few tensors that decoding needs: per layer one q/k/v weight, o, one gate/up weight, down.

In a mixture the last two are the router and the packed experts.

q, k, v (and gate, up) are joined (modules/joined.py): one launch instead of three, and N large enough to fill a GPU.
The model keeps working: its own modules become views into the joined weights, so nothing is held twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowq_cli.hf.experts import QuantExperts
from lowq_kernels.decode.reference import Heads
from lowq_kernels.modules.joined import join

MIXTURES = ("mixtral", "qwen3_moe")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", *MIXTURES)
ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_OF_LENGTH = ("dynamic", "longrope")  # their angles depend on how long the text already is


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
    """The sum over a token's top_k experts, weighted as `reference.route` says. router (E, H)."""

    router: torch.Tensor
    experts: QuantExperts
    top_k: int
    normalise: bool
    rounded: bool

    @property
    def route(self) -> tuple[torch.Tensor, int, bool, bool]:
        """What `reference.route` takes after x."""
        return self.router, self.top_k, self.normalise, self.rounded


@dataclass(frozen=True)
class Layer:
    """One decoder layer. post_attention and post_mlp norm what is added to the residual (Gemma), or are None."""

    qkv: nn.Module
    o: nn.Module
    mlp: Mlp | Mixture
    heads: Heads
    rope: str
    before_attention: Norm
    before_mlp: Norm
    post_attention: torch.Tensor | None
    post_mlp: torch.Tensor | None


class Blocks:
    """What `FusedDecoder` reads. `linears` holds the weights under short names, for `--explain`."""

    def __init__(self, model: Any) -> None:
        self.config = config = model.config.get_text_config()
        base = model.model
        self.embed, self.rotary = base.embed_tokens, base.rotary_emb
        gemma = config.model_type.startswith("gemma")
        self.layers = [_layer(layer, i, config, gemma) for i, layer in enumerate(base.layers)]
        self.norm = _norm(base.norm, gemma)
        self.head = model.lm_head
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.act = ACTS[_act_name(config)]
        named = nn.ModuleList(_named(layer) for layer in self.layers)
        self.linears = nn.ModuleDict({"layers": named, "head": self.head})

    def rope_tables(self, slots: int, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Kind of layer -> cos, sin (slots, R), as the model's own rotary embedding computes and rounds them."""
        x = torch.empty(0, dtype=dtype, device=device)
        ids = torch.arange(slots, device=device)[None]
        kinds = {layer.rope for layer in self.layers}
        angles = {kind: self.rotary(x, ids, kind) if kind else self.rotary(x, ids) for kind in kinds}
        return {kind: (cos[0].contiguous(), sin[0].contiguous()) for kind, (cos, sin) in angles.items()}


def why_not(model: Any) -> str | None:
    """The reason this model cannot be decoded from `Blocks`, or None."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of the families with fused layers ({', '.join(FAMILIES)})"
    base = getattr(model, "model", None)
    wanted = ("layers", "embed_tokens", "norm", "rotary_emb")
    if base is None or not all(hasattr(base, name) for name in wanted) or not hasattr(model, "lm_head"):
        return f"{type(model).__name__} is not built like the causal models of its family"
    if _act_name(config) not in ACTS:
        return f"activation {_act_name(config)}"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    if any(r.get("rope_type") in ROPE_OF_LENGTH for r in kinds):
        return "rotary angles that depend on the length of the text"
    if getattr(config, "attn_logit_softcapping", None):
        return "soft-capped attention"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention that is not causal"
    if len({p.device for p in model.parameters()}) > 1:
        return "the model is spread over several devices"
    routed = [layer.mlp for layer in base.layers if hasattr(getattr(layer, "mlp", None), "experts")]
    if not all(isinstance(mlp.experts, QuantExperts) for mlp in routed):
        return "experts that are not packed"
    if any(hasattr(m, "_hf_hook") for m in model.modules()):
        return "hooks of accelerate sit on its modules"
    return None


def _act_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))


def _norm(module: nn.Module, gemma: bool) -> Norm:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return Norm(_norm_weight(module, gemma), float(eps))  # type: ignore[arg-type]


def _norm_weight(module: Any, gemma: bool) -> torch.Tensor:
    weight = module.weight.detach()
    return 1.0 + weight.float() if gemma else weight  # fp32: 1 + w is what the model computes, and bf16 would round it


def _layer(layer: Any, index: int, config: Any, gemma: bool) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    kinds = getattr(config, "layer_types", None)
    window = getattr(attention, "sliding_window", None)
    if window is None and kinds is None:  # Mistral and Phi-3 keep it in the config, for every layer
        window = getattr(config, "sliding_window", None)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    heads = Heads(
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        float(attention.scaling),
        int(window or 0),
        float(getattr(q_norm, "variance_epsilon", getattr(q_norm, "eps", 0.0))),
        None if q_norm is None else _norm_weight(q_norm, gemma),
        None if k_norm is None else _norm_weight(k_norm, gemma),
    )
    post = gemma and layer.post_attention_layernorm, gemma and layer.post_feedforward_layernorm
    return Layer(
        qkv=attention.qkv_proj if hasattr(attention, "qkv_proj") else join(attention, ("q_proj", "k_proj", "v_proj")),
        o=attention.o_proj,
        mlp=_mixture(mlp) if hasattr(mlp, "experts") else _mlp(mlp),
        heads=heads,
        rope=kinds[index] if gemma and kinds else "",
        before_attention=_norm(layer.input_layernorm, gemma),
        before_mlp=_norm(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm, gemma),
        post_attention=_norm_weight(post[0], gemma) if gemma else None,
        post_mlp=_norm_weight(post[1], gemma) if gemma else None,
    )


def _mlp(mlp: Any) -> Mlp:
    return Mlp(mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else join(mlp, ("gate_proj", "up_proj")), mlp.down_proj)


def _mixture(mlp: Any) -> Mixture:
    router = mlp.gate
    only_some = hasattr(router, "norm_topk_prob")  # Qwen's routers have the choice, and round; Mixtral's always normalises
    normalise = router.norm_topk_prob if only_some else True
    return Mixture(router.weight.detach(), mlp.experts, int(router.top_k), bool(normalise), rounded=only_some)


def _named(layer: Layer) -> nn.ModuleDict:
    mlp = layer.mlp
    own = {"gate_up": mlp.gate_up, "down": mlp.down} if isinstance(mlp, Mlp) else {"experts": mlp.experts}
    return nn.ModuleDict({"qkv": layer.qkv, "o": layer.o, **own})
