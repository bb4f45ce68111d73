"""StableLM: Llama with layer norms, and RoPE on a quarter of each head."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, check_head_dim, mlp, model, pre_norm, rope, unless
from lowq_packers.arch.parts import Model, Norm, Update


def stablelm(c: Any) -> Model:
    check_head_dim(c)
    unless(c.qk_layernorm, "a norm module for each head")

    def norm(c: Any, name: str) -> Norm:
        return Norm(name, c.hidden_size, float(c.layer_norm_eps), "layer", bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a, m = attention(c, p, bias=c.use_qkv_bias, turned=rope(c, share=0.25)), mlp(c, f"{p}.mlp")
        if c.use_parallel_residual:
            return (Update((a, m), norm(c, f"{p}.input_layernorm")),)
        return pre_norm(c, p, a, m, norm)

    return model(c, layer, norm(c, "norm"))


DEFAULTS = {
    "eos_token_id": 0, "tie_word_embeddings": False, "num_key_value_heads": 32, "hidden_act": "silu", "layer_norm_eps": 1e-5,
    "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
}  # fmt: skip
FAMILIES = (Family("stablelm", stablelm, DEFAULTS, sizes=(50304, 2560, 6912, 32, 32, 4096, None)),)
