"""Falcon-H1: Mamba-2 and attention in parallel after one norm, with constant factors in most places."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, mamba2, mlp, model, rms, unless
from lowq_packers.arch.parts import Branch, Model, Update


def falcon_h1(c: Any) -> Model:
    unless(c.hidden_act not in ("silu", "swish"), f"a convolution with activation {c.hidden_act}")
    inner = int(c.mamba_expand * c.hidden_size) if c.mamba_d_ssm is None else c.mamba_d_ssm
    sizes = (c.mamba_n_heads, inner // c.mamba_n_heads, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_conv)
    biases = (c.mamba_proj_bias, c.projectors_bias, c.mamba_conv_bias)
    gate, down = c.mlp_multipliers or (1.0, 1.0)
    constants = {
        "scales": tuple(map(float, c.ssm_multipliers or (1.0,) * 5)), "normed": bool(c.mamba_rms_norm),
        "gate_last": bool(c.mamba_rms_norm and c.mamba_norm_before_gate), "limit": c.time_step_limit,
    }  # fmt: skip

    def layer(i: int, p: str) -> tuple[Update, ...]:
        state = mamba2(c, f"{p}.mamba", *sizes, c.rms_norm_eps, biases=biases, **constants)
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, key_scale=float(c.key_multiplier))
        both = (
            Branch(state, into=float(c.ssm_in_multiplier), out=float(c.ssm_out_multiplier)),
            Branch(a, into=float(c.attention_in_multiplier), out=float(c.attention_out_multiplier)),
        )
        m = mlp(c, f"{p}.feed_forward", bias=c.mlp_bias, gate_scale=float(gate))
        return Update(both, rms(c, f"{p}.input_layernorm")), Update((m,), rms(c, f"{p}.pre_ff_layernorm"), scale=float(down))

    scales: dict[str, Any] = {"embed_scale": float(c.embedding_multiplier), "logit_scale": float(c.lm_head_multiplier)}
    return model(c, layer, rms(c, "final_layernorm"), **scales)


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": 8, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_norm_before_gate": True,
    "mamba_rms_norm": False, "time_step_limit": (0.0, float("inf")), "projectors_bias": False, "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0, "mlp_multipliers": None, "key_multiplier": 1.0, "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0, "ssm_multipliers": None, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
}  # fmt: skip
FAMILIES = (Family("falcon_h1", falcon_h1, DEFAULTS, sizes=(128000, 4096, 14336, 32, 32, 8192, 1e-5)),)
