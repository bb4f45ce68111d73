"""The fields that transformers 5 renamed or nested in config.json, under the names that other readers know.

mlx-lm 0.32 takes a missing rope_theta for its own default (10,000 or 1,000,000 by family) and says nothing: a model saved by
transformers 5 would run with other positions. What a config says itself stays.
"""

from collections.abc import Mapping
from typing import Any


def spelled_out(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """`config` with rope_theta, rope_scaling, rope_local_base_freq, num_experts and tie_word_embeddings (`tied`) as fields."""
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}  # Gemma 3 has a table for each kind of attention
    rope = rope.get("full_attention") or rope
    found = {"rope_theta": rope.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if str(config.get("model_type")).endswith("moe"):
        found["num_experts"] = config.get("num_local_experts")
    known = {k: v for k, v in found.items() if v is not None and config.get(k) is None}
    return {**config, **known, "tie_word_embeddings": config.get("tie_word_embeddings", tied)}
