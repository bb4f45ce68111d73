"""Helium (Kyutai): Llama with RoPE on neighbouring pairs of values."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, check_head_dim, mlp, model, pre_norm, rope
from lowq_packers.arch.parts import Model, Update


def helium(c: Any) -> Model:
    check_head_dim(c)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, turned=rope(c, pairing="neighbours"))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", bias=c.mlp_bias))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 20, "head_dim": 128, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
FAMILIES = (Family("helium", helium, DEFAULTS, 100000.0, sizes=(48000, 2560, 7040, 24, 20, 4096, 1e-8)),)
