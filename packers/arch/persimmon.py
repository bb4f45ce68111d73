"""Persimmon (Adept): layer norms, also of each head; q, k, v of a head stored together; an MLP of squared ReLU, no gate."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, check_head_dim, head_dim, mlp, model, pre_norm, rope
from lowq_packers.arch.parts import Model, Norm, Update


def persimmon(c: Any) -> Model:
    check_head_dim(c)

    def norm(c: Any, name: str, size: int = 0) -> Norm:
        return Norm(name, size or c.hidden_size, float(c.layer_norm_eps), "layer", bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts: dict[str, Any] = {"order": "heads", "turned": rope(c, share=0.5), "kv_heads": c.num_attention_heads}
        if c.qk_layernorm:
            facts |= {f"{n}_norm": norm(c, f"{p}.self_attn.{n}_layernorm", head_dim(c)) for n in "qk"}
        a = attention(c, p, True, True, ("query_key_value",), "dense", **facts)
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", 0, ("dense_h_to_4h",), "dense_4h_to_h", True, gated=False), norm)

    return model(c, layer, norm(c, "final_layernorm"))


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "relu2", "layer_norm_eps": 1e-5, "qk_layernorm": True,
}  # fmt: skip
FAMILIES = (Family("persimmon", persimmon, DEFAULTS, sizes=(262144, 4096, 16384, 36, 64, 16384, None)),)
