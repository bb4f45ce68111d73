"""Mellum 2 (JetBrains): Qwen 3's mixtures with windows, which turn by another base."""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, attention, head_norms, mlp, model, pre_norm, rope, window
from lowq_packers.arch.parts import Model, Update
from lowq_packers.arch.qwen2 import mixture


def mellum(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts = head_norms(c, p) | {"window": window(c, i), "turned": rope(c, c.layer_types[i], share=1.0)}
        dense = c.mlp_layer_types is not None and c.mlp_layer_types[i] == "dense"
        m = mlp(c, f"{p}.mlp") if dense else mixture(c, f"{p}.mlp", c.norm_topk_prob, False)
        return pre_norm(c, p, attention(c, p, c.attention_bias, c.attention_bias, **facts), m)

    return model(c, layer, extra=("mtp.",))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, for a config.json that names none."""
    return [FULL] * config["num_hidden_layers"]


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": False, "sliding_window": 1024, "moe_intermediate_size": 896, "num_experts_per_tok": 8, "num_experts": 64,
    "norm_topk_prob": True, "layer_types": None, "mlp_layer_types": None,
}  # fmt: skip
SIZES = (98304, 2304, 7168, 28, 32, 131072, 1e-6)
FAMILIES = (Family("mellum", mellum, DEFAULTS, 500000.0, 10000.0, own_rope=True, layer_types=layer_types, sizes=SIZES),)
