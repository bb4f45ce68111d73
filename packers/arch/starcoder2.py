"""StarCoder 2: layer norms, biases everywhere, an MLP without a gate."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mlp, model, pre_norm
from lowq_packers.arch.parts import Model, Norm, Update


def starcoder2(c: Any) -> Model:
    def norm(c: Any, name: str) -> Norm:
        return Norm(name, c.hidden_size, float(c.norm_epsilon), "layer", bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, c.use_bias, c.use_bias, window=c.sliding_window or 0)
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", 0, ("c_fc",), "c_proj", c.use_bias, gated=False), norm)

    return model(c, layer, norm(c, "norm"))


DEFAULTS = {
    "eos_token_id": 50256, "tie_word_embeddings": True, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5, "sliding_window": None, "use_bias": True,
}  # fmt: skip
FAMILIES = (Family("starcoder2", starcoder2, DEFAULTS, sizes=(49152, 3072, 12288, 30, 24, 4096, None)),)
