"""Phi (1 to 2): attention and MLP in parallel, biases everywhere. Phi-3: q, k, v in one tensor, gate and up in another."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, head_dim, mlp, model, pre_norm, rope
from lowq_packers.arch.parts import Model, Norm, Update


def phi(c: Any) -> Model:
    def norm(name: str, size: int = 0) -> Norm:
        return Norm(name, size or c.hidden_size, float(c.layer_norm_eps), "layer", bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        named = {n: norm(f"{p}.self_attn.{n}_layernorm", head_dim(c)) for n in "qk" if c.qk_layernorm}
        norms: dict[str, Any] = {f"{n}_norm": part for n, part in named.items()}
        a = attention(c, p, bias=True, o_bias=True, o="dense", turned=rope(c, share=0.5), **norms)
        m = mlp(c, f"{p}.mlp", names=("fc1",), down="fc2", gated=False, bias=True)
        return (Update((a, m), norm(f"{p}.input_layernorm")),)

    return model(c, layer, norm("final_layernorm"), head_bias=True)


def phi3(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, names=("qkv_proj",), window=c.sliding_window or 0, turned=rope(c, share=1.0))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", names=("gate_up_proj",)))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": 32000, "tie_word_embeddings": False, "num_key_value_heads": None, "hidden_act": "silu",
    "sliding_window": None, "original_max_position_embeddings": 4096,
}  # fmt: skip
PHI = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": None, "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5, "qk_layernorm": False,
}  # fmt: skip
FAMILIES = (
    Family("phi", phi, PHI, sizes=(51200, 2048, 8192, 24, 32, 2048, None)),
    Family("phi3", phi3, DEFAULTS, sizes=(32064, 3072, 8192, 32, 32, 4096, 1e-5)),
)
