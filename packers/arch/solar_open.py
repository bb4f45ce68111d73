"""Solar Open (Upstage): Llama's attention, and DeepSeek V3's mixture in every layer."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, model, pre_norm, rope
from lowq_packers.arch.deepseek import by_sigmoid, mixture
from lowq_packers.arch.parts import Model, Update


def solar_open(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, turned=rope(c, share=1.0))
        return pre_norm(c, p, a, mixture(c, f"{p}.mlp", by_sigmoid(c, f"{p}.mlp")))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": False, "moe_intermediate_size": 1280, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
SIZES = (196608, 4096, None, 48, 64, 131072, 1e-5)
FAMILIES = (Family("solar_open", solar_open, DEFAULTS, 1000000.0, sizes=SIZES),)
