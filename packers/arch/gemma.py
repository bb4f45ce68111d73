"""Gemma: norms of 1 + w. Gemma 2: norms before and after each half, windows in every second layer, soft caps. VaultGemma: Gemma
2 without the norms after."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, SLIDING, attention, mlp, model, pre_norm, rms, unless, window
from lowq_packers.arch.parts import Mixer, Model, Norm, Update


def one(c: Any, name: str, size: int = 0) -> Norm:
    """An RMSNorm that multiplies by 1 + weight."""
    return rms(c, name, size, add_one=True)


def sandwich(c: Any, p: str, first: Mixer, second: Mixer, norm: Any = one) -> tuple[Update, ...]:
    """Gemma 2's layer: a norm before and one after each of two mixers."""
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    a, b, x, y = (norm(c, f"{p}.{n}") for n in names)
    return Update((first,), a, b), Update((second,), x, y)


def causal(c: Any) -> None:
    """Raise NotDescribed for a model with bidirectional attention."""
    unless(getattr(c, "use_bidirectional_attention", None) in (True, "all"), "bidirectional attention")


def gemma(c: Any) -> Model:
    causal(c)
    activation = "gelu_pytorch_tanh" if c.hidden_act == "gelu" else c.hidden_act  # the first files call it gelu

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias)
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", activation=activation), one)

    return model(c, layer, one(c, "norm"), embed_scale=c.hidden_size**0.5)


def gemma2(c: Any) -> Model:
    causal(c)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts = {"scale": c.query_pre_attn_scalar**-0.5, "softcap": float(c.attn_logit_softcapping or 0.0)}
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, window=window(c, i), **facts)
        return sandwich(c, p, a, mlp(c, f"{p}.mlp", activation=c.hidden_activation))

    cap = float(c.final_logit_softcapping or 0.0)
    return model(c, layer, one(c, "norm"), embed_scale=c.hidden_size**0.5, softcap=cap)


def vaultgemma(c: Any) -> Model:
    whole = gemma2(c)
    return replace(whole, layers=tuple(tuple(replace(update, post=None) for update in layer) for layer in whole.layers))


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of Gemma 2, if config.json has no layer_types."""
    return [FULL if i % 2 else SLIDING for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": 1, "tie_word_embeddings": True, "head_dim": 256, "attention_bias": False,
    "use_bidirectional_attention": None,
}  # fmt: skip
GEMMA = DEFAULTS | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"}
GEMMA2 = DEFAULTS | {
    "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
}  # fmt: skip
VAULTGEMMA = {name: value for name, value in GEMMA2.items() if name != "use_bidirectional_attention"}
FAMILIES = (
    Family("gemma", gemma, GEMMA, sizes=(256000, 3072, 24576, 28, 16, 8192, 1e-6)),
    Family("gemma2", gemma2, GEMMA2, layer_types=layer_types, sizes=(256000, 2304, 9216, 26, 8, 8192, 1e-6)),
    Family("vaultgemma", vaultgemma, VAULTGEMMA, layer_types=layer_types, sizes=(256000, 2304, 9216, 26, 8, 8192, 1e-6)),
)
