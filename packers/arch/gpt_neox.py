"""GPT-NeoX (Pythia): attention and MLP in parallel, each after a norm of its own; q, k, v of a head are stored together."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, check_head_dim, mlp, model, rope
from lowq_packers.arch.parts import Branch, Model, Norm, Update


def gpt_neox(c: Any) -> Model:
    check_head_dim(c)

    def norm(name: str) -> Norm:
        return Norm(name, c.hidden_size, float(c.layer_norm_eps), "layer", bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        facts = {"order": "heads", "kv_heads": c.num_attention_heads, "turned": rope(c, share=0.25)}
        a = attention(c, p, c.attention_bias, c.attention_bias, ("query_key_value",), "dense", "attention", **facts)
        m = mlp(c, f"{p}.mlp", 0, ("dense_h_to_4h",), "dense_4h_to_h", True, gated=False)
        first, second = norm(f"{p}.input_layernorm"), norm(f"{p}.post_attention_layernorm")
        if c.use_parallel_residual:
            return (Update((Branch(a, first), Branch(m, second))),)
        return Update((a,), first), Update((m,), second)

    files = (("gpt_neox.", "embed_out"),)
    return model(c, layer, norm("final_layer_norm"), embed="embed_in", prefix="gpt_neox.", files=files)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
    "use_parallel_residual": True, "attention_bias": True,
}  # fmt: skip
FAMILIES = (
    Family("gpt_neox", gpt_neox, DEFAULTS, rope_names=("rotary_emb_base", "rotary_pct"),
        sizes=(50432, 6144, 24576, 44, 64, 2048, None)),
)  # fmt: skip
