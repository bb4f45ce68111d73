"""A transformers model as the few tensors that decoding needs: per layer one q/k/v weight, o, one gate/up weight, down.

q, k, v (and gate, up) of one scheme become one weight along N: one launch instead of three, and N large enough to fill a
GPU. The model keeps working: its own modules become views into the joined weights, so nothing is held twice.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowq_kernels.decode.reference import Heads
from lowq_kernels.linear import QuantLinear
from lowq_packers.layouts import PackedWeight, repack

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")
ACTS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_OF_LENGTH = ("dynamic", "longrope")  # their angles depend on how long the text already is


@dataclass(frozen=True)
class Norm:
    """An RMSNorm's weight (H,), with Gemma's 1 + w already added, and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """One decoder layer. post_attention and post_mlp norm what is added to the residual (Gemma), or are None."""

    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module
    heads: Heads
    rope: str
    before_attention: Norm
    before_mlp: Norm
    post_attention: torch.Tensor | None
    post_mlp: torch.Tensor | None


class Blocks(nn.Module):
    """What `FusedDecoder` reads. `linears` holds the weights under short names, for `--explain`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = config = model.config.get_text_config()
        base = model.model
        object.__setattr__(self, "embed", base.embed_tokens)
        object.__setattr__(self, "rotary", base.rotary_emb)
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
    if any(hasattr(m, "_hf_hook") for m in model.modules()):
        return "hooks of accelerate sit on its modules"
    return None


def _act_name(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")


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
        gate_up=mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else join(mlp, ("gate_proj", "up_proj")),
        down=mlp.down_proj,
        heads=heads,
        rope=kinds[index] if gemma else "",
        before_attention=_norm(layer.input_layernorm, gemma),
        before_mlp=_norm(layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm, gemma),
        post_attention=_norm_weight(post[0], gemma) if gemma else None,
        post_mlp=_norm_weight(post[1], gemma) if gemma else None,
    )


def _named(layer: Layer) -> nn.ModuleDict:
    return nn.ModuleDict({"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down})


def join(parent: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """One module for the products of `names` side by side; those modules become views into it."""
    parts = [getattr(parent, name) for name in names]
    if isinstance(parts[0], Part):  # joined before, by an earlier decoder of this model
        return parts[0].whole
    if all(type(p) is nn.Linear for p in parts) and len({(p.weight.dtype, p.bias is None) for p in parts}) == 1:
        return _join_dense(parts)
    if all(type(p) is QuantLinear for p in parts) and len({(p.scheme, p.kernel, p.weight_scale.dtype) for p in parts}) == 1:
        whole = _join_packed(parts)
        at = 0
        for name, p in zip(names, parts, strict=True):
            setattr(parent, name, Part(whole, at, at + p.out_features))
            at += p.out_features
        return whole
    return SideBySide(parts)


def _join_dense(parts: list[nn.Linear]) -> nn.Linear:
    weight = torch.cat([p.weight.detach() for p in parts])
    bias = None if parts[0].bias is None else torch.cat([p.bias.detach() for p in parts])
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, "meta", weight.dtype)
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        whole.bias = nn.Parameter(bias, requires_grad=False)
    at = 0
    for p in parts:
        rows = slice(at, at + p.out_features)
        p.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            p.bias = nn.Parameter(bias[rows], requires_grad=False)
        at += p.out_features
    return whole


def _join_packed(parts: list[QuantLinear]) -> QuantLinear:
    rows = [repack(p.packed, "rowstream") for p in parts]
    N, first = sum(p.N for p in rows), rows[0]
    words, scales = torch.cat([p.words for p in rows]), torch.cat([p.scales for p in rows])
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in rows if p.zeros is not None])
    bias = None
    if any(p.bias is not None for p in parts):
        like = scales.new_zeros
        bias = torch.cat([like(p.out_features) if p.bias is None else p.bias.data.to(scales.dtype) for p in parts])
    packed = PackedWeight(words, scales, zeros, first.scheme, N, first.K, "rowstream")
    return QuantLinear.from_packed(packed, bias, layout=parts[0].wanted_layout, kernel=parts[0].kernel)


class Part(nn.Module):
    """Rows begin .. end of a joined layer, in the place of the layer that held them.

    It computes the whole and cuts, so it is right but not fast; the decoder does not go through it.
    """

    def __init__(self, whole: QuantLinear, begin: int, end: int) -> None:
        super().__init__()
        object.__setattr__(self, "whole", whole)  # no submodule: the first layer's part must not own the others' weight
        self.begin, self.end = begin, end
        self.in_features, self.out_features, self.scheme = whole.in_features, end - begin, whole.scheme

    @property
    def weight(self) -> torch.Tensor:
        """The whole's words: for code that asks a layer for its device or dtype."""
        return self.whole.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., end - begin)."""
        return self.whole(x)[..., self.begin : self.end]

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        p, rows = repack(self.whole.packed, "rowstream"), slice(self.begin, self.end)
        tensors = {"weight": p.words, "weight_scale": p.scales, "weight_zero": p.zeros, "bias": self.whole.bias}
        for name, t in tensors.items():
            if t is not None:
                destination[prefix + name] = t[rows].detach()


class SideBySide(nn.Module):
    """Layers that cannot be one weight (different widths, or some packed and some not), called one after the other."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., sum of N)."""
        return torch.cat([p(x) for p in self.parts], -1)
