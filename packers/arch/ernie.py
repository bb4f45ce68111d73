"""ERNIE 4.5: Llama with RoPE on neighbouring pairs; its mixtures, with shared experts and a bias for the choice of experts."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, experts, mlp, model, pre_norm, rope, router
from lowq_packers.arch.parts import Attention, Experts, Model, Update

MTP = tuple(f"model.mtp_{n}." for n in ("block", "linear_proj", "emb_norm", "hidden_norm"))


def attend(c: Any, p: str) -> Attention:
    return attention(c, p, bool(c.use_bias), bool(c.use_bias), turned=rope(c, pairing="neighbours"))


def ernie4_5(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attend(c, p), mlp(c, f"{p}.mlp", bias=bool(c.use_bias)))

    return model(c, layer)


def mixture(c: Any, p: str) -> Experts:
    bias = {"bias": f"{p}.gate.moe_statics.e_score_correction_bias", "bias_shape": (1, c.moe_num_experts)}
    of = router(c, f"{p}.gate", c.moe_num_experts, top_k=c.moe_k, rounded=True, **bias)
    inner = c.moe_intermediate_size * c.moe_num_shared_experts
    shared = mlp(c, f"{p}.shared_experts", inner, bias=bool(c.use_bias)) if inner else None
    return experts(c, p, of, c.moe_intermediate_size, shared=shared)


def ernie4_5_moe(c: Any) -> Model:
    last = c.num_hidden_layers - 1 if c.moe_layer_end_index == -1 else c.moe_layer_end_index

    def layer(i: int, p: str) -> tuple[Update, ...]:
        routed = (i + 1) % c.moe_layer_interval == 0 and c.moe_layer_start_index <= i <= last
        return pre_norm(c, p, attend(c, p), mixture(c, f"{p}.mlp") if routed else mlp(c, f"{p}.mlp", bias=bool(c.use_bias)))

    moved = (".gate.moe_statics.", ".moe_statics.")
    return model(c, layer, head_bias=bool(c.use_bias), renamed=(moved,), extra=MTP)


DEFAULTS = {"eos_token_id": 2, "tie_word_embeddings": True, "hidden_act": "silu", "use_bias": False}
DENSE = DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128}
MOE = DEFAULTS | {
    "num_key_value_heads": 4, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip
FAMILIES = (
    Family("ernie4_5", ernie4_5, DENSE, 500000.0, sizes=(103424, 1024, 3072, 18, 16, 131072, 1e-5)),
    Family("ernie4_5_moe", ernie4_5_moe, MOE, 500000.0, sizes=(103424, 2560, 12288, 28, 20, 131072, 1e-5)),
)
