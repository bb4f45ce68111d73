"""Restore config.json's fields that transformers 5 renamed or nested, under the names that other readers know.

mlx-lm 0.32 silently replaces a missing rope_theta by its default (10,000 or 1,000,000, depending on the family): a model saved
by transformers 5 would run with wrong positions. Fields that a config has already are not changed.
"""

from collections.abc import Mapping
from typing import Any


def spelled_out(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """`config` with the fields rope_theta, rope_scaling, rope_local_base_freq, num_experts and tie_word_embeddings (`tied`)."""
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}  # Gemma 3 has a table for each kind of attention
    rope = rope.get("full_attention") or rope
    fields = {"rope_theta": rope.get("rope_theta"), "rope_local_base_freq": local.get("rope_theta")}
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if str(config.get("model_type")).endswith("moe"):
        fields["num_experts"] = config.get("num_local_experts")
    known = {k: v for k, v in fields.items() if v is not None and config.get(k) is None}
    return {**config, **known, "tie_word_embeddings": config.get("tie_word_embeddings", tied)}
