"""What Qwen's families share: a sliding window that use_sliding_window switches on, from layer max_window_layers on."""

from collections.abc import Mapping
from typing import Any

DEFAULTS = {"eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 32, "hidden_act": "silu"}
WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, for a config.json that names none."""
    first = config["max_window_layers"] if config.get("sliding_window") is not None else config["num_hidden_layers"]
    return ["sliding_attention" if i >= first else "full_attention" for i in range(config["num_hidden_layers"])]
