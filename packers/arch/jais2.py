"""Jais 2: Llama with layer norms, biases everywhere, and an MLP of squared ReLU without a gate."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mlp, model, pre_norm
from lowq_packers.arch.parts import Model, Norm, Update


def jais2(c: Any) -> Model:
    def norm(c: Any, name: str) -> Norm:
        return Norm(name, c.hidden_size, float(c.layer_norm_eps), "layer", bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, c.attention_bias, c.attention_bias)
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", names=("up_proj",), gated=False, bias=c.mlp_bias), norm)

    return model(c, layer, norm(c, "norm"))


DEFAULTS = {
    "eos_token_id": 150024, "tie_word_embeddings": False, "num_key_value_heads": None, "head_dim": None, "hidden_act": "relu2",
    "attention_bias": True, "mlp_bias": True, "layer_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES = (Family("jais2", jais2, DEFAULTS, sizes=(150272, 3328, 26624, 32, 26, 8192, None)),)
