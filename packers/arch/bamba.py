"""Bamba (IBM): Mamba-2 layers and a few attention layers with RoPE on half of each head; each layer also has an MLP."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mamba2, mlp, model, rms, rope, unless
from lowq_packers.arch.parts import Mixer, Model, Update


def bamba(c: Any) -> Model:
    unless(c.hidden_act != "silu", f"a convolution with activation {c.hidden_act}")
    dim = c.mamba_expand * c.hidden_size // c.mamba_n_heads
    sizes = (c.mamba_n_heads, dim, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_conv, c.rms_norm_eps)
    more = {"biases": (c.mamba_proj_bias, c.mamba_proj_bias, c.mamba_conv_bias), "limit": c.time_step_limit}

    def mixer(i: int, p: str) -> Mixer:
        if i in (c.attn_layer_indices or ()):
            return attention(c, p, c.attention_bias, c.attention_bias, turned=rope(c, share=0.5))
        return mamba2(c, f"{p}.mamba", *sizes, **more)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        m = mlp(c, f"{p}.feed_forward", bias=c.mlp_bias)
        return Update((mixer(i, p),), rms(c, f"{p}.input_layernorm")), Update((m,), rms(c, f"{p}.pre_ff_layernorm"))

    return model(c, layer, rms(c, "final_layernorm"))


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 8, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "attn_layer_indices": None, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
FAMILIES = (Family("bamba", bamba, DEFAULTS, sizes=(128000, 4096, 14336, 32, 32, 262144, 1e-5)),)
