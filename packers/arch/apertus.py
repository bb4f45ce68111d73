"""Apertus (Swiss AI): Llama with norms of each head, and an MLP of xIELU without a gate."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, head_norms, mlp, model, rms
from lowq_packers.arch.parts import Model, Update


def apertus(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, c.attention_bias, c.attention_bias, **head_norms(c, p))
        m = mlp(c, f"{p}.mlp", names=("up_proj",), gated=False)
        return Update((a,), rms(c, f"{p}.attention_layernorm")), Update((m,), rms(c, f"{p}.feedforward_layernorm"))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": None, "hidden_act": "xielu",
    "attention_bias": False,
}  # fmt: skip
FAMILIES = (Family("apertus", apertus, DEFAULTS, 12000000.0, own_rope=True, sizes=(131072, 4096, 14336, 32, 32, 65536, 1e-5)),)
