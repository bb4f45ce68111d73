"""gpt-oss: an attention sink per head, windows in every second layer, biases everywhere, a mixture with a clamped gate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, SLIDING, STACKS, attention, experts, model, pre_norm, router, unless, window
from lowq_packers.arch.parts import Experts, Model, Update


def mixture(c: Any, p: str) -> Experts:
    swiglu = getattr(c, "swiglu_alpha", 1.702), getattr(c, "swiglu_limit", 7.0)
    unless(swiglu != (1.702, 7.0), "a gate with other constants than gpt-oss's")
    of = router(c, f"{p}.router", c.num_local_experts, logits_bias=True, rounded=True)
    stacks = {"bias": True, "stacked": True, "transposed": "both", "interleaved": True}
    return replace(experts(c, p, of, c.intermediate_size, STACKS, activation="silu", **stacks), act="clamped_swiglu")


def gpt_oss(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts: dict[str, Any] = {"window": window(c, i), "sinks": f"{p}.self_attn.sinks"}
        return pre_norm(c, p, attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, **facts), mixture(c, f"{p}.mlp"))

    return model(c, layer)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has no layer_types."""
    return [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
    "sliding_window": 128, "layer_types": None, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
}  # fmt: skip
FAMILIES = (
    Family("gpt_oss", gpt_oss, DEFAULTS, 150000.0, own_rope=True, layer_types=layer_types,
        sizes=(201088, 2880, 2880, 36, 64, 131072, 1e-5)),
)  # fmt: skip
