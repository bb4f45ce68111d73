"""Gemma 4: two head sizes, keys as values, keys shared between layers, experts parallel to an MLP, per-layer embeddings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    FULL,
    SLIDING,
    STACKS,
    attention,
    experts,
    linear,
    mlp,
    model,
    rms,
    rope_parameters,
    router,
    token_of,
    unless,
    window,
    wrapper,
)
from lowq_packers.arch.gemma import causal, sandwich
from lowq_packers.arch.parts import Attention, Branch, Images, Model, PerLayer, Rope, TokenTable, Update


def shares(c: Any, i: int) -> int | None:
    """The layer whose keys and values layer i attends to: the last of its kind before the num_kv_shared_layers last ones."""
    first = c.num_hidden_layers - c.num_kv_shared_layers
    return None if i < first else max(j for j in range(first) if c.layer_types[j] == c.layer_types[i])


def heads(c: Any, i: int) -> tuple[int, int]:
    """The head size of layer i, and its number of key heads."""
    if getattr(c, "per_layer_config", None):
        return c.per_layer_config[i].head_dim, c.per_layer_config[i].num_key_value_heads
    far = c.layer_types[i] == FULL
    fewer = c.num_global_key_value_heads if far and c.attention_k_eq_v else None
    return c.global_head_dim if far else c.head_dim, fewer or c.num_key_value_heads


def attend(c: Any, i: int, p: str) -> Attention:
    kind, (D, kv), of, s = c.layer_types[i], heads(c, i), shares(c, i), f"{p}.self_attn"
    alike = c.attention_k_eq_v and kind == FULL
    r = rope_parameters(c, kind)
    dims = int(D * (r.get("partial_rotary_factor") or 1.0)) if r["rope_type"] == "proportional" else D
    key_norms = {} if of is not None else {"k_norm": rms(c, f"{s}.k_norm", D), "v_norm": rms(c, "", D)}
    names = ("q_proj",) if of is not None else ("q_proj", "k_proj") if alike else ("q_proj", "k_proj", "v_proj")
    more: dict[str, Any] = {
        "dim": D,
        "kv_heads": kv,
        "scale": 1.0,
        "window": window(c, i),
        "q_norm": rms(c, f"{s}.q_norm", D),
        **key_norms,
    }
    turned = Rope(dims, kind, of=D if dims < D else 0)
    bias = bool(c.attention_bias)
    return attention(c, p, bias, bias, names, turned=turned, v_is_k=bool(alike and of is None), shares=of, **more)


def mixed(c: Any, p: str, second: Update) -> Update:
    """The MLP's update with experts in parallel, which read the same stream through norms of their own."""
    of = router(
        c, f"{p}.router.proj", c.num_experts, top_k=c.top_k_experts, norm=rms(c, ""), scale=f"{p}.router.scale",
        each=f"{p}.router.per_expert_scale",
    )  # fmt: skip
    e = experts(c, p, of, c.moe_intermediate_size, STACKS, activation=c.hidden_activation, stacked=True)
    after = (rms(c, f"{p}.post_feedforward_layernorm_{n}") for n in (1, 2))
    dense = Branch(second.mixers[0], second.norm, next(after))
    return Update((dense, Branch(e, rms(c, f"{p}.pre_feedforward_layernorm_2"), next(after))), post=second.post)


def gemma4_text(c: Any) -> Model:
    causal(c)
    unless(c.layer_types[-1] != FULL, "a last layer without full attention")  # which transformers' config changes
    d = c.hidden_size_per_layer_input

    def layer(i: int, p: str) -> tuple[Update, ...]:
        wide = 2 if c.use_double_wide_mlp and shares(c, i) is not None else 1
        m = mlp(c, f"{p}.mlp", wide * c.intermediate_size, activation=c.hidden_activation)
        first, second = sandwich(c, p, attend(c, i, p), m, rms)
        rows = [first, mixed(c, p, second) if c.enable_moe_block else second]
        if d:
            gate, up = linear(c, f"{p}.per_layer_input_gate", d), linear(c, f"{p}.per_layer_projection", c.hidden_size, d)
            rows.append(Update((PerLayer(gate, up, m.act, i),), post=rms(c, f"{p}.post_per_layer_input_norm")))
        return (*rows[:-1], replace(rows[-1], after=f"{p}.layer_scalar"))

    n, table = c.num_hidden_layers, None
    if d:
        project, norm = linear(c, "per_layer_model_projection", n * d), rms(c, "per_layer_projection_norm", d)
        sizes = (c.vocab_size_per_layer_input, n, d, d**0.5)
        table = TokenTable("embed_tokens_per_layer", *sizes, project, c.hidden_size**-0.5, norm)
    unused = (f"model.layers.{i}.self_attn.{m}." for i in range(n) if shares(c, i) is not None for m in OF_KEYS)
    scales = {"embed_scale": c.hidden_size**0.5, "softcap": float(c.final_logit_softcapping or 0.0)}
    return model(c, layer, by_layer=True, tokens=table, extra=tuple(unused), **scales)


def images(c: Any) -> Images:
    token, begin, end = (token_of(c, *of) for of in (("image", 258880), ("boi", 255999), ("eoi", 258882)))
    both_ways = getattr(c.text_config, "use_bidirectional_attention", None) == "vision"
    return Images(token, "framed", begin, end, whole="windows" if both_ways else "")


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has no layer_types."""
    n = config["num_hidden_layers"]
    return [FULL if i % 6 == 5 or i == n - 1 else SLIDING for i in range(n)]


OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")  # files also hold these for layers that use another layer's keys
DEFAULTS = {
    "eos_token_id": 1, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None,
    "use_bidirectional_attention": None, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
    "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None, "global_head_dim": 512,
    "num_global_key_value_heads": None,
}  # fmt: skip
TOWERS = tuple(f"model.{n}." for n in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))
PLACEHOLDERS = {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881}
gemma4 = wrapper(
    gemma4_text,
    *TOWERS,
    files=(),
    images=images,
    placeholders=PLACEHOLDERS,
    read_as=lambda c: getattr(c, "pad_token_id", None) or 0,
)
FAMILIES = (
    Family("gemma4_text", gemma4_text, DEFAULTS, 1000000.0, 10000.0, own_rope=True, layer_types=layer_types,
        sizes=(262144, 2304, 9216, 30, 8, 131072, 1e-6)),
    Family("gemma4", gemma4, {"tie_word_embeddings": True}, text="gemma4_text"),
)  # fmt: skip
