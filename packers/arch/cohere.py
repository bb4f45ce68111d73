"""Cohere: attention and MLP in parallel after one layer norm, RoPE on neighbouring pairs. Cohere 2: RoPE only with a window."""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, SLIDING, attention, head_dim, kv_heads, mlp, model, rope, window
from lowq_packers.arch.parts import Attention, Model, Norm, Update


def norm(c: Any, name: str, size: int = 0, **more: Any) -> Norm:
    return Norm(name, size or c.hidden_size, float(c.layer_norm_eps), "layer", **more)


def side_by_side(c: Any, p: str, a: Attention) -> tuple[Update, ...]:
    return (Update((a, mlp(c, f"{p}.mlp")), norm(c, f"{p}.input_layernorm")),)


def cohere(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts: dict[str, Any] = {"turned": rope(c, pairing="neighbours")}
        if c.use_qk_norm:  # each head has weights of its own
            D, counts = head_dim(c), {"q": c.num_attention_heads, "k": kv_heads(c)}
            facts |= {f"{n}_norm": norm(c, f"{p}.self_attn.{n}_norm", H * D, groups=H, shape=(H, D)) for n, H in counts.items()}
            facts |= {"norm_over": "all"}
        return side_by_side(c, p, attention(c, p, c.attention_bias, c.attention_bias, **facts))

    return model(c, layer, norm(c, "norm"), logit_scale=float(c.logit_scale))


def cohere2(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        near = window(c, i)
        turned = rope(c, pairing="neighbours") if near else None
        return side_by_side(c, p, attention(c, p, c.attention_bias, c.attention_bias, turned=turned, window=near))

    return model(c, layer, norm(c, "norm"), logit_scale=float(c.logit_scale))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has a pattern or nothing."""
    pattern = config.get("sliding_window_pattern", 4)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": 255001, "tie_word_embeddings": True, "num_key_value_heads": None, "hidden_act": "silu",
    "attention_bias": False, "logit_scale": 0.0625, "layer_norm_eps": 1e-5,
}  # fmt: skip
COHERE2 = DEFAULTS | {"sliding_window": 4096, "layer_types": None}
FAMILIES = (
    Family("cohere", cohere, DEFAULTS | {"use_qk_norm": False}, 500000.0, sizes=(256000, 8192, 22528, 40, 64, 8192, None)),
    Family("cohere2", cohere2, COHERE2, layer_types=layer_types, sizes=(256000, 8192, 22528, 40, 64, 8192, None)),
)
