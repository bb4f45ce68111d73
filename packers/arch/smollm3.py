"""SmolLM3: Llama without RoPE in every fourth layer."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mlp, model, pre_norm, rope
from lowq_packers.arch.parts import Model, Update


def smollm3(c: Any) -> Model:
    every = c.no_rope_layer_interval
    turns = c.no_rope_layers or [(i + 1) % every != 0 for i in range(c.num_hidden_layers)]  # 1: RoPE

    def near(i: int) -> int:
        kinds = getattr(c, "layer_types", None)
        slides = kinds[i] == "sliding_attention" if kinds else not turns[i]
        return (c.sliding_window or 0) if c.use_sliding_window and slides else 0

    def layer(i: int, p: str) -> tuple[Update, ...]:
        turned = rope(c) if turns[i] else None
        a = attention(c, p, c.attention_bias, c.attention_bias, turned=turned, window=near(i))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", bias=c.mlp_bias))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 128001, "tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}  # fmt: skip
FAMILIES = (Family("smollm3", smollm3, DEFAULTS, 2000000.0, sizes=(128256, 2048, 11008, 36, 16, 32768, 1e-6)),)
