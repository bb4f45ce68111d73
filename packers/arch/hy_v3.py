"""Hunyuan 3: Llama with norms of each head; DeepSeek V3's mixtures after the first layers."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, experts, head_norms, mlp, model, pre_norm, router
from lowq_packers.arch.parts import Experts, Model, Update

FILES = ((".mlp.gate.", ".mlp.router.gate."), (".mlp.e_score_correction_bias", ".mlp.expert_bias"))
RENAMED = (*FILES, (".mlp.shared_experts.", ".mlp.shared_mlp."))


def mixture(c: Any, p: str) -> Experts:
    how = {"score": "sigmoid", "bias": f"{p}.e_score_correction_bias", "sum_eps": 1e-20}
    of = router(c, f"{p}.gate", c.num_experts, factor=float(c.router_scaling_factor), **how)
    shared = mlp(c, f"{p}.shared_experts", c.moe_intermediate_size * c.num_shared_experts, bias=c.mlp_bias)
    return experts(c, p, of, c.moe_intermediate_size, shared=shared)


def hy_v3(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        dense = c.mlp_layer_types[i] == "dense" if c.mlp_layer_types else i == 0
        m = mlp(c, f"{p}.mlp", bias=c.mlp_bias) if dense else mixture(c, f"{p}.mlp")
        return pre_norm(c, p, attention(c, p, c.attention_bias, c.attention_bias, **head_norms(c, p)), m)

    return model(c, layer, renamed=RENAMED, extra=(f"model.layers.{c.num_hidden_layers}.",))


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "mlp_layer_types": None,
}  # fmt: skip
FAMILIES = (Family("hy_v3", hy_v3, DEFAULTS, 11158840.0, sizes=(120832, 4096, 13312, 80, 64, 131072, 1e-5)),)
