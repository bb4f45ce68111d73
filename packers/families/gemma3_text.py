"""Gemma 3's language model: norms of 1 + w before and after each half, windows in five layers of six, two kinds of rotation."""

from collections.abc import Mapping
from typing import Any

from lowq_packers.families import Family


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, for a config.json that has a pattern or nothing."""
    pattern = config.get("sliding_window_pattern", 6)
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(config["num_hidden_layers"])]


FAMILY = Family(
    "gemma3_text",
    {"eos_token_id": 1, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None}
    | {"final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
    rope_theta=1000000.0,
    qk_norm=True,
    norm_adds_one=True,
    post_norms=True,
    windows="by layer_types",
    layer_types=layer_types,
    rope_by_layer_type=True,
    scaled_embedding=True,
    activation="hidden_activation",
    soft_capped=True,
    attention_scale="query_pre_attn_scalar",
    not_rotated="it has norms behind attention and MLP, whose weights do not commute with a rotation",
)
