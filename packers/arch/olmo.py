"""OLMo: layer norms without weights. OLMo 2: norms only after each half, norms of q and k over all heads. OLMo 3: also windows.

OLMoE: norms before each half, and a mixture. FlexOlmo: OLMo 2 with OLMoE's mixtures. EXAONE 4: OLMo 2 with norms of each head.
"""

from collections.abc import Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    FULL,
    SLIDING,
    attention,
    experts,
    head_norms,
    mlp,
    model,
    norms_of_all,
    pre_norm,
    rms,
    rope,
    router,
    unless,
    window,
)
from lowq_packers.arch.parts import Attention, Experts, Mlp, Model, Norm, Update


def olmo(c: Any) -> Model:
    def norm(c: Any, name: str) -> Norm:
        return Norm("", c.hidden_size, 1e-5, "layer")

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, c.attention_bias, c.attention_bias, clip=float(c.clip_qkv or 0.0))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp"), norm)

    return model(c, layer, norm(c, ""))


def after(c: Any, p: str, a: Attention, m: Mlp | Experts | None = None) -> tuple[Update, ...]:
    """OLMo 2's layer: a norm after each mixer instead of before it."""
    first, second = (rms(c, f"{p}.post_{n}_layernorm") for n in ("attention", "feedforward"))
    return Update((a,), post=first), Update((m or mlp(c, f"{p}.mlp"),), post=second)


def olmo2(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return after(c, p, attention(c, p, c.attention_bias, c.attention_bias, **norms_of_all(c, p)))

    return model(c, layer)


def olmo3(c: Any) -> Model:
    by_kind = FULL in c.rope_parameters  # older transformers have one rotation for all

    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts = norms_of_all(c, p) | {"window": window(c, i), "turned": rope(c, c.layer_types[i] if by_kind else "")}
        return after(c, p, attention(c, p, c.attention_bias, c.attention_bias, **facts))

    return model(c, layer)


def mixture(c: Any, p: str) -> Experts:
    of = router(c, f"{p}.mlp.gate", c.num_experts, normalise=c.norm_topk_prob, rounded=True)
    return experts(c, f"{p}.mlp", of, c.intermediate_size)


def flex_olmo(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, c.attention_bias, c.attention_bias, **norms_of_all(c, p))
        return after(c, p, a, mixture(c, p))

    return model(c, layer)


def olmoe(c: Any) -> Model:
    unless(c.clip_qkv is not None, "queries, keys and values that are clipped")

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, c.attention_bias, c.attention_bias, **norms_of_all(c, p)), mixture(c, p))

    return model(c, layer)


def attend_exaone(c: Any, i: int, p: str) -> Attention:
    """EXAONE 4's attention: layers without a window have no RoPE, unless no layer has a window."""
    near = c.sliding_window is None or c.layer_types[i] == SLIDING
    return attention(c, p, window=window(c, i), turned=rope(c) if near else None, **head_norms(c, p))


def exaone4(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return after(c, p, attend_exaone(c, i, p))

    return model(c, layer)


def by_pattern(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has no layer_types."""
    every = config.get("sliding_window_pattern", 4)
    unless(not isinstance(every, int), f"sliding_window_pattern {every!r}")
    return [SLIDING if every and (i + 1) % every else FULL for i in range(config["num_hidden_layers"])]


DEFAULTS = {
    "eos_token_id": 50279, "tie_word_embeddings": False, "num_key_value_heads": None, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
MOE = {"num_experts_per_tok": 5, "num_experts": 7, "norm_topk_prob": False}
OLMOE = DEFAULTS | {"clip_qkv": None, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False}
OLMO3 = DEFAULTS | {"sliding_window": 4096, "layer_types": None}
EXAONE4 = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 32, "hidden_act": "silu", "sliding_window": 4096,
    "sliding_window_pattern": 4, "layer_types": None,
}  # fmt: skip
FAMILIES = (
    Family("olmo", olmo, DEFAULTS | {"clip_qkv": None}, sizes=(50304, 4096, 11008, 32, 32, 2048, None)),
    Family("olmo2", olmo2, DEFAULTS, sizes=(50304, 4096, 11008, 32, 32, 2048, 1e-5)),
    Family("olmo3", olmo3, OLMO3, 500000.0, 500000.0, layer_types=by_pattern, sizes=(50304, 4096, 11008, 32, 32, 2048, 1e-5)),
    Family("olmoe", olmoe, OLMOE, mlx=True, sizes=(50304, 2048, 2048, 16, 16, 4096, 1e-5)),
    Family(
        "flex_olmo", flex_olmo, DEFAULTS | MOE | {"eos_token_id": 100257}, 500000.0,
        sizes=(100352, 4096, 11008, 32, 32, 4096, 1e-6),
    ),
    Family("exaone4", exaone4, EXAONE4, layer_types=by_pattern, sizes=(102400, 4096, 16384, 32, 32, 2048, 1e-5)),
)  # fmt: skip
