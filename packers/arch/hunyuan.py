"""Hunyuan: Llama with norms of each head of q and k after RoPE; its mixtures, with a shared MLP."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, experts, head_norms, mlp, model, pre_norm, router, unless
from lowq_packers.arch.parts import Attention, Experts, Model, Update


def attend(c: Any, p: str) -> Attention:
    norms = head_norms(c, p, ("query_layernorm", "key_layernorm")) | {"norm_last": True}
    return attention(c, p, c.attention_bias, c.attention_bias, **norms)


def hunyuan_v1_dense(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attend(c, p), mlp(c, f"{p}.mlp"))

    return model(c, layer)


def hunyuan_v1_moe(c: Any) -> Model:
    unless(not isinstance(c.num_experts, int), "layers with different numbers of experts")

    def mixture(i: int, p: str) -> Experts:
        top_k = c.moe_topk if isinstance(c.moe_topk, int) else c.moe_topk[i]
        of = router(c, f"{p}.gate.wg", c.num_experts, top_k=top_k, rounded=True)
        return experts(c, p, of, c.intermediate_size, shared=mlp(c, f"{p}.shared_mlp"))

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attend(c, p), mixture(i, f"{p}.mlp"))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "attention_bias": False,
}  # fmt: skip
FAMILIES = (
    Family("hunyuan_v1_dense", hunyuan_v1_dense, DEFAULTS, sizes=(290943, 4096, 11008, 32, 32, 2048, 1e-5)),
    Family("hunyuan_v1_moe", hunyuan_v1_moe, DEFAULTS | {"num_experts": 1, "moe_topk": 1},
        sizes=(290943, 4096, 11008, 32, 32, 2048, 1e-5)),
)  # fmt: skip
