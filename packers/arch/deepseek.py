"""DeepSeek V2 and V3: latent attention, dense first layers, experts chosen within groups, and shared experts.

Kimi K2 is V3 under another name, Youtu-LLM is V3 without experts.
Mistral 4 is V3 with a softmax router and queries that are scaled by their position.
"""

import math
from collections.abc import Callable
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    STACKS,
    experts,
    linear,
    mlp,
    model,
    mtp_layers,
    pre_norm,
    rope_parameters,
    router,
    unless,
    wrapper,
)
from lowq_packers.arch.mistral import position_scale
from lowq_packers.arch.parts import Experts, LatentAttention, Linear, Mixer, Model, Norm, Rope, Update


def latent(c: Any, p: str, pairing: Any = "neighbours", **more: Any) -> LatentAttention:
    """DeepSeek's attention at path `p`; its inner norms have an eps of 1e-6 whatever the config says."""
    H, q_dim, bias = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim, bool(c.attention_bias)
    v_dim = c.v_head_dim or c.hidden_size // H
    rank, kv, kv_rows = c.q_lora_rank, f"{p}.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim
    down: tuple[Linear, ...] = (
        linear(c, (f"{p}.q_a_proj" if rank else f"{p}.q_proj", kv), (rank or H * q_dim, kv_rows), bias=bias),
    )
    if bias and not rank:
        down = linear(c, f"{p}.q_proj", H * q_dim), linear(c, kv, kv_rows, bias=True)
    return LatentAttention(
        down,
        Norm(f"{p}.q_a_layernorm", rank, 1e-6) if rank else None,
        linear(c, f"{p}.q_b_proj", H * q_dim, rank) if rank else None,
        Norm(f"{p}.kv_a_layernorm", c.kv_lora_rank, 1e-6),
        linear(c, f"{p}.kv_b_proj", H * (c.qk_nope_head_dim + v_dim), c.kv_lora_rank),
        linear(c, f"{p}.o_proj", c.hidden_size, H * v_dim, bias=bias),
        H, c.qk_nope_head_dim, c.qk_rope_head_dim, v_dim, c.kv_lora_rank, _scale(c, q_dim),
        Rope(c.qk_rope_head_dim, pairing=pairing), **more,
    )  # fmt: skip


def _scale(c: Any, q_dim: int) -> float:
    """The scale of attention's scores, which YaRN's mscale_all_dim increases."""
    r = rope_parameters(c)
    factor, all_dim = float(r.get("factor") or 1.0), r.get("mscale_all_dim") or 0
    stretched = r.get("rope_type", "default") != "default" and all_dim and factor > 1
    return q_dim**-0.5 * ((0.1 * all_dim * math.log(factor) + 1.0) ** 2 if stretched else 1.0)


def mixture(c: Any, p: str, of: dict[str, Any], **more: Any) -> Experts:
    """Routed and shared experts at path `p`. of: further fields of the Router."""
    gate = router(c, f"{p}.gate", c.n_routed_experts, factor=float(c.routed_scaling_factor), **of)
    shared = mlp(c, f"{p}.shared_experts", c.moe_intermediate_size * c.n_shared_experts)
    return experts(c, p, gate, c.moe_intermediate_size, shared=shared, **more)


def by_sigmoid(c: Any, p: str) -> dict[str, Any]:
    """V3's choice of experts."""
    groups, bias = (c.n_group or 1, c.topk_group or 1), f"{p}.gate.e_score_correction_bias"
    return {"score": "sigmoid", "bias": bias, "groups": groups, "normalise": bool(c.norm_topk_prob), "sum_eps": 1e-20}


def decoder(c: Any, attend: Callable[[str], Mixer], mix: Callable[[str], Experts], **more: Any) -> Model:
    """Dense layers first, then mixtures; attend, mix: functions of a layer's path."""

    def layer(i: int, p: str) -> tuple[Update, ...]:
        kinds = getattr(c, "mlp_layer_types", None)
        dense = kinds[i] == "dense" if kinds else i < getattr(c, "first_k_dense_replace", 1)
        return pre_norm(c, p, attend(f"{p}.self_attn"), mlp(c, f"{p}.mlp") if dense else mix(f"{p}.mlp"))

    return model(c, layer, extra=mtp_layers(c), **more)


def deepseek_v2(c: Any) -> Model:
    unless(getattr(c, "mlp_bias", False), "MLPs with biases")
    unless(c.topk_method not in ("greedy", "group_limited_greedy"), f"experts chosen by {c.topk_method}")
    grouped = c.topk_method == "group_limited_greedy"
    groups = (c.n_group, c.topk_group) if grouped else (1, 1)
    of = {"groups": groups, "group_score": "max", "normalise": False}
    return decoder(c, lambda p: latent(c, p), lambda p: mixture(c, p, of))


def deepseek_v3(c: Any) -> Model:
    pairing = "neighbours" if c.rope_interleave else "halves"
    return decoder(c, lambda p: latent(c, p, pairing), lambda p: mixture(c, p, by_sigmoid(c, p)))


def youtu(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        pairing = "neighbours" if c.rope_interleave else "halves"
        return pre_norm(c, p, latent(c, f"{p}.self_attn", pairing), mlp(c, f"{p}.mlp"))

    return model(c, layer)


def mistral4(c: Any) -> Model:
    pairing, groups = "neighbours" if c.rope_interleave else "halves", (c.n_group or 1, c.topk_group or 1)
    of = {"groups": groups, "normalise": bool(c.norm_topk_prob), "sum_eps": 1e-20, "rounded": True}

    def attend(p: str) -> LatentAttention:
        return latent(c, p, pairing, position_scale=position_scale(c))

    return decoder(c, attend, lambda p: mixture(c, p, of, stacked=True, leaves=STACKS))


SHARED = {"eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False}
V2 = SHARED | {
    "num_key_value_heads": None, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
}  # fmt: skip
V3 = SHARED | {
    "eos_token_id": 1, "num_key_value_heads": 128, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "routed_scaling_factor": 2.5, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "moe_intermediate_size": 2048, "rope_interleave": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
MISTRAL4 = {k: v for k, v in V3.items() if k != "num_nextn_predict_layers"} | {
    "eos_token_id": 2, "num_key_value_heads": 32, "first_k_dense_replace": 0, "kv_lora_rank": 256, "q_lora_rank": 1024,
    "n_group": 1, "n_routed_experts": 128, "qk_nope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_group": 1,
    "num_experts_per_tok": 4,
}  # fmt: skip
YOUTU = SHARED | {
    "eos_token_id": 128001, "tie_word_embeddings": True, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
}  # fmt: skip
TOWERS = ("model.vision_tower.", "model.mm_projector.", "vision_tower.", "mm_projector.")
PLACEHOLDERS = {"image_token_id": 163605, "video_token_id": 163840}
kimi_k25 = wrapper(deepseek_v3, *TOWERS, placeholders=PLACEHOLDERS)
FAMILIES = (
    Family("deepseek_v2", deepseek_v2, V2, sizes=(102400, 4096, 11008, 32, 32, 2048, 1e-6)),
    Family("deepseek_v3", deepseek_v3, V3, sizes=(129280, 7168, 18432, 61, 128, 4096, 1e-6)),
    Family("kimi_k2", deepseek_v3, V3, sizes=(129280, 7168, 18432, 61, 128, 4096, 1e-6)),
    Family("kimi_k25", kimi_k25, {"tie_word_embeddings": True}, text="deepseek_v3"),
    Family("youtu", youtu, YOUTU, sizes=(128256, 2048, 6144, 32, 16, 131072, 1e-6)),
    Family("mistral4", mistral4, MISTRAL4, own_rope=True, sizes=(131072, 4096, 12288, 36, 32, 1048576, 1e-6)),
)
