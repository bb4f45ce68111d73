"""Trinity (Arcee): gated attention with RoPE only in layers with a window, norms around each half, DeepSeek V3's mixtures."""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    FULL,
    SLIDING,
    attention,
    experts,
    head_norms,
    linear,
    mlp,
    model,
    rms,
    rope,
    router,
    window,
)
from lowq_packers.arch.parts import Attention, Experts, Model, Update


def attend(c: Any, i: int, p: str) -> Attention:
    gate = linear(c, f"{p}.self_attn.gate_proj", c.num_attention_heads * c.head_dim)
    facts = head_norms(c, p) | {"window": window(c, i), "turned": rope(c) if c.layer_types[i] == SLIDING else None}
    return attention(c, p, c.attention_bias, c.attention_bias, gate=gate, **facts)


def mixture(c: Any, p: str) -> Experts:
    how = {"score": "sigmoid", "bias": f"{p}.expert_bias", "sum_eps": 1e-20, "factor": float(c.route_scale)}
    shared = mlp(c, f"{p}.shared_experts", c.moe_intermediate_size * c.num_shared_experts)
    return experts(c, p, router(c, f"{p}.router.gate", c.num_experts, **how), c.moe_intermediate_size, shared=shared)


def afmoe(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        names = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
        before, after, then, last = (rms(c, f"{p}.{n}") for n in names)
        m = mlp(c, f"{p}.mlp") if i < c.num_dense_layers else mixture(c, f"{p}.mlp")
        return Update((attend(c, i, p),), before, after), Update((m,), then, last)

    return model(c, layer, embed_scale=c.hidden_size**0.5 if c.mup_enabled else 1.0)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has no layer_types."""
    every = config["global_attn_every_n_layers"]
    return [SLIDING if (i + 1) % every else FULL for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": False, "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6,
    "num_shared_experts": 2, "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024, "layer_types": None,
    "mup_enabled": False,
}  # fmt: skip
SIZES = (200192, 2048, 6144, 32, 16, 16384, 1e-5)
FAMILIES = (Family("afmoe", afmoe, DEFAULTS, layer_types=layer_types, sizes=SIZES),)
