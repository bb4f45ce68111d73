"""MiniCPM 3: DeepSeek V2's attention and an MLP, with Granite's kind of constants."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import mlp, model, pre_norm
from lowq_packers.arch.deepseek import latent
from lowq_packers.arch.parts import Model, Update


def minicpm3(c: Any) -> Model:
    scale = 1.0 if c.scale_depth is None else c.scale_depth / c.num_hidden_layers**0.5

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, latent(c, f"{p}.self_attn", "halves"), mlp(c, f"{p}.mlp", bias=c.mlp_bias), scale=scale)

    base = c.dim_model_base or c.hidden_size
    return model(c, layer, embed_scale=float(c.scale_emb), logit_scale=base / c.hidden_size)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": True, "num_key_value_heads": 40, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "head_dim": None, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
}  # fmt: skip
FAMILIES = (Family("minicpm3", minicpm3, DEFAULTS, sizes=(73448, 2560, 6400, 62, 40, 32768, 1e-5)),)
