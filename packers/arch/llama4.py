"""Llama 4: chunked attention with RoPE in most layers, no RoPE in the others; routing weights multiply the experts' inputs."""

from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    STACKS,
    attention,
    experts,
    head_dim,
    mlp,
    model,
    of_vision,
    pre_norm,
    rms,
    rope,
    router,
    token_of,
    wrapper,
)
from lowq_packers.arch.parts import Attention, Experts, Images, Mlp, Model, PositionScale, Update

CHUNKED = "chunked_attention"


def attend(c: Any, i: int, p: str) -> Attention:
    unit, kinds = rms(c, "", head_dim(c)), c.layer_types
    turned = c.no_rope_layers[i] if c.no_rope_layers else (i + 1) % c.no_rope_layer_interval  # at least 1 in layers with RoPE
    unit_norms = {"q_norm": unit, "k_norm": unit, "norm_last": True}
    norms: dict[str, Any] = unit_norms if c.use_qk_norm and turned else {}
    if c.attn_temperature_tuning and not turned:
        norms = {"position_scale": PositionScale(float(c.attn_scale), float(c.floor_scale), 1)}
    chunk = (c.attention_chunk_size or 0) if (kinds[i] == CHUNKED if kinds else turned) else 0
    rotation = rope(c, pairing="neighbours") if turned else None
    return attention(c, p, c.attention_bias, c.attention_bias, turned=rotation, chunk=chunk, **norms)


def llama4_text(c: Any) -> Model:
    routed = range(c.interleave_moe_layer_step - 1, c.num_hidden_layers, c.interleave_moe_layer_step)

    def second(i: int, p: str) -> Mlp | Experts:
        if i not in (routed if c.moe_layers is None else c.moe_layers):
            return mlp(c, p, c.intermediate_size_mlp)
        of = router(c, f"{p}.router", c.num_local_experts, score="sigmoid", normalise=False, rounded=True)
        more = {"stacked": True, "transposed": "both", "weigh_inputs": True, "shared": mlp(c, f"{p}.shared_expert")}
        return experts(c, p, of, c.intermediate_size, STACKS, **more)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attend(c, i, p), second(i, f"{p}.feed_forward"))

    return model(c, layer)


def images(c: Any) -> Images:
    token, begin, end = (token_of(c, *of) for of in (("image", 200092), ("boi", 200080), ("eoi", 200081)))
    patch, shuffle = of_vision(c, "patch_size", 14), of_vision(c, "pixel_shuffle_ratio", 0.5)
    return Images(token, "tiles", begin, end, patch=patch, merge=round(1 / shuffle))


def llama4(c: Any) -> Model:
    towers = ("vision_model.", "multi_modal_projector.")
    whole = wrapper(llama4_text, *towers, prefix="language_model.model.", files=(), images=images)(c)
    return replace(whole, head="language_model.lm_head", tied=bool(c.text_config.tie_word_embeddings))


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": False, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "num_local_experts": 16,
    "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layers": None,
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "layer_types": None, "attn_temperature_tuning": True,
    "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
FAMILIES = (
    Family("llama4_text", llama4_text, DEFAULTS, 500000.0, sizes=(202048, 5120, 8192, 48, 40, 131072, 1e-5)),
    Family("llama4", llama4, {"tie_word_embeddings": False}, text="llama4_text"),
)
