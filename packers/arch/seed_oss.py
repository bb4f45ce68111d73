"""Seed-OSS: Llama with biases of q, k and v."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mlp, model, pre_norm
from lowq_packers.arch.parts import Model, Update


def seed_oss(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, c.attention_bias, c.attention_out_bias), mlp(c, f"{p}.mlp", bias=c.mlp_bias))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
}  # fmt: skip
FAMILIES = (Family("seed_oss", seed_oss, DEFAULTS, sizes=(155136, 4096, 27648, 64, 80, 524288, 1e-6)),)
