"""K-EXAONE: EXAONE 4's attention with a norm before it, DeepSeek V3's mixtures."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import experts, mlp, model, pre_norm, router
from lowq_packers.arch.deepseek import by_sigmoid
from lowq_packers.arch.olmo import attend_exaone, by_pattern
from lowq_packers.arch.parts import Experts, Model, Update


def mixture(c: Any, p: str) -> Experts:
    of = router(c, f"{p}.gate", c.num_experts, factor=float(c.routed_scaling_factor), **by_sigmoid(c, p))
    shared = mlp(c, f"{p}.shared_experts", c.moe_intermediate_size * c.num_shared_experts)
    return experts(c, p, of, c.moe_intermediate_size, shared=shared)


def exaone_moe(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        dense = c.mlp_layer_types[i] == "dense" if c.mlp_layer_types else i < c.first_k_dense_replace
        return pre_norm(c, p, attend_exaone(c, i, p), mlp(c, f"{p}.mlp") if dense else mixture(c, f"{p}.mlp"))

    moved = (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias")
    return model(c, layer, renamed=(moved,), extra=("mtp.",))


DEFAULTS = {
    "eos_token_id": 53, "tie_word_embeddings": False, "num_key_value_heads": 32, "hidden_act": "silu", "sliding_window": 4096,
    "sliding_window_pattern": 4, "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SIZES = (102400, 4096, 16384, 32, 32, 2048, 1e-5)
FAMILIES = (Family("exaone_moe", exaone_moe, DEFAULTS, layer_types=by_pattern, sizes=SIZES),)
