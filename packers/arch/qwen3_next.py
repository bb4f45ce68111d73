"""Qwen3-Next and Qwen 3.5: three layers of gated delta rule, then one of gated attention; norms of 1 + w."""

from collections.abc import Callable, Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    FULL,
    LINEAR,
    STACKS,
    attention,
    head_norms,
    linear,
    mlp,
    model,
    pre_norm,
    rms,
    rope,
    three_part,
    unless,
    wrapper,
)
from lowq_packers.arch.gemma import one
from lowq_packers.arch.parts import Conv, GatedDelta, Mixer, Model, Update
from lowq_packers.arch.qwen2 import VL_TOP, mixture, sparse


def delta(c: Any, p: str, grouped: bool) -> GatedDelta:
    """The linear attention at path `p`. grouped: Qwen3-Next's order of rows."""
    unless(c.hidden_act not in ("silu", "swish"), f"a convolution with activation {c.hidden_act}")
    k_heads, v_heads = c.linear_num_key_heads, c.linear_num_value_heads
    k_dim, v_dim = c.linear_key_head_dim, c.linear_value_head_dim
    qkv, v = 2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim
    rows = {"qkvz": qkv + v, "ba": 2 * v_heads} if grouped else {"qkv": qkv, "z": v, "b": v_heads, "a": v_heads}
    return GatedDelta(
        linear(c, tuple(f"{p}.in_proj_{n}" for n in rows), tuple(rows.values())),
        Conv(f"{p}.conv1d", qkv, c.linear_conv_kernel_dim),
        linear(c, f"{p}.out_proj", c.hidden_size, v),
        f"{p}.A_log", f"{p}.dt_bias", rms(c, f"{p}.norm", v_dim), k_heads, v_heads, k_dim, v_dim, grouped,
    )  # fmt: skip


def decoder(c: Any, second: Callable[[int, str], Mixer], grouped: bool = False, **more: Any) -> Model:
    """second: a function of a layer's number and path -> its MLP or experts."""

    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts: dict[str, Any] = {"gated": True, **head_norms(c, p, add_one=True)}
        a: Mixer = (
            delta(c, f"{p}.linear_attn", grouped)
            if c.layer_types[i] == LINEAR
            else attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, turned=rope(c, share=0.25), **facts)
        )
        return pre_norm(c, p, a, second(i, f"{p}.mlp"), one)

    return model(c, layer, one(c, "norm"), extra=("mtp.",), **more)


def qwen3_next(c: Any) -> Model:
    def second(i: int, p: str) -> Mixer:
        return mixture(c, p, c.norm_topk_prob, True) if sparse(c, i) else mlp(c, p)

    return decoder(c, second, grouped=True)


def qwen3_5_text(c: Any) -> Model:
    return decoder(c, lambda i, p: mlp(c, p), files=IN_WRAPPER)


def qwen3_5_moe_text(c: Any) -> Model:
    return decoder(c, lambda i, p: mixture(c, p, True, True, stacked=True, leaves=STACKS), files=IN_WRAPPER)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has an interval or nothing."""
    every = config.get("full_attention_interval", 4)
    return [LINEAR if (i + 1) % every else FULL for i in range(config["num_hidden_layers"])]


IN_WRAPPER = (("model.language_model.", "lm_head"),)  # the prefixes of a text model in the files of a model with a vision tower
DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "layer_types": None,
}  # fmt: skip
MOE = {
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip
NEXT = MOE | {
    "decoder_sparse_step": 1, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "mlp_only_layers": None,
}  # fmt: skip
PICTURES: dict[str, Any] = {"files": (), "images": three_part(248056, (11, 11, 10), True)}
FAMILIES = (
    Family("qwen3_next", qwen3_next, DEFAULTS | NEXT, layer_types=layer_types, sizes=(151936, 2048, 5632, 48, 16, 32768, 1e-6)),
    Family("qwen3_5_text", qwen3_5_text, DEFAULTS | {"num_key_value_heads": 4}, layer_types=layer_types,
        sizes=(248320, 4096, 12288, 32, 16, 32768, 1e-6)),
    Family("qwen3_5_moe_text", qwen3_5_moe_text, DEFAULTS | MOE, layer_types=layer_types,
        sizes=(248320, 2048, None, 40, 16, 32768, 1e-6)),
    Family("qwen3_5", wrapper(qwen3_5_text, "model.visual.", **PICTURES), VL_TOP, text="qwen3_5_text"),
    Family("qwen3_5_moe", wrapper(qwen3_5_moe_text, "model.visual.", **PICTURES), VL_TOP, text="qwen3_5_moe_text"),
)  # fmt: skip
