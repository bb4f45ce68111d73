"""Gemma 3: Gemma 2 with norms of q and k instead of soft caps, windows in five of six layers, two bases of RoPE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, SLIDING, attention, head_norms, mlp, model, rope, token_of, window, wrapper
from lowq_packers.arch.gemma import causal, one, sandwich
from lowq_packers.arch.parts import Images, Model, Update


def gemma3_text(c: Any) -> Model:
    causal(c)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts = head_norms(c, p, add_one=True) | {"scale": c.query_pre_attn_scalar**-0.5, "window": window(c, i)}
        turned = rope(c, c.layer_types[i])
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, turned=turned, **facts)
        return sandwich(c, p, a, mlp(c, f"{p}.mlp", activation=c.hidden_activation))

    cap = float(c.final_logit_softcapping or 0.0)
    return model(c, layer, one(c, "norm"), embed_scale=c.hidden_size**0.5, softcap=cap)


def images(c: Any) -> Images:
    token, begin, end = (token_of(c, *of) for of in (("image", 262144), ("boi", 255999), ("eoi", 256000)))
    return Images(token, "framed", begin, end, "\n\n", getattr(c, "mm_tokens_per_image", None) or 256, whole="all")


def gemma3(c: Any) -> Model:
    towers = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")
    return replace(wrapper(gemma3_text, *towers, images=images)(c), softcap=0.0)  # the wrapper does not apply it


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has a pattern or nothing."""
    pattern = config.get("sliding_window_pattern", 6)
    return [SLIDING if (i + 1) % pattern else FULL for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": 1, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False,
}  # fmt: skip
FAMILIES = (
    Family("gemma3_text", gemma3_text, DEFAULTS, 1000000.0, 10000.0, layer_types=layer_types,
        sizes=(262208, 2304, 9216, 26, 8, 131072, 1e-6)),
    Family("gemma3", gemma3, {"tie_word_embeddings": True}, text="gemma3_text"),
)  # fmt: skip
