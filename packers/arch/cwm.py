"""CWM (Meta): Llama with windows in three of four layers."""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, SLIDING, attention, mlp, model, pre_norm, window
from lowq_packers.arch.parts import Model, Update


def cwm(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, window=window(c, i)), mlp(c, f"{p}.mlp", bias=c.mlp_bias))

    return model(c, layer)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has no layer_types."""
    return [SLIDING if i % 4 else FULL for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "mlp_bias": False, "sliding_window": 8192, "layer_types": None,
}  # fmt: skip
SIZES = (128256, 6144, 21504, 64, 48, 131072, 1e-5)
FAMILIES = (Family("cwm", cwm, DEFAULTS, 1000000.0, own_rope=True, layer_types=layer_types, sizes=SIZES),)
