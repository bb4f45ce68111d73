"""Llama: a norm before attention and before a gated MLP. InternLM 3 and IQuest-Coder are Llamas under other names."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mlp, model, pre_norm
from lowq_packers.arch.parts import Model, Update


def llama(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias)
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", bias=c.mlp_bias))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": None,
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
}  # fmt: skip
NAMED = DEFAULTS | {"head_dim": 128}
FAMILIES = (
    Family("llama", llama, DEFAULTS, gguf="llama", gguf_class="LlamaForCausalLM", mlx=True,
        sizes=(32000, 4096, 11008, 32, 32, 2048, 1e-6)),
    Family("internlm3", llama, NAMED | {"num_key_value_heads": 2}, sizes=(128512, 4096, 10240, 48, 32, 32768, 1e-5)),
    Family("iquestcoder", llama, NAMED | {"num_key_value_heads": 8}, sizes=(76800, 5120, 27648, 80, 40, 131072, 1e-5)),
)  # fmt: skip
