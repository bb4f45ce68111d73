"""Arcee: Llama whose MLP is a squared ReLU without a gate."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mlp, model, pre_norm
from lowq_packers.arch.parts import Model, Update


def arcee(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias)
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", names=("up_proj",), gated=False, bias=c.mlp_bias))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 128001, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": None,
    "attention_bias": False, "mlp_bias": False, "hidden_act": "relu2",
}  # fmt: skip
FAMILIES = (Family("arcee", arcee, DEFAULTS, sizes=(32000, 2560, 18432, 32, 32, 4096, 1e-5)),)
