"""Mamba-2 models without attention (Codestral Mamba): a layer is one norm and one mixer."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import mamba2 as mixer
from lowq_packers.arch.common import model, unless
from lowq_packers.arch.parts import Model, Norm, Update


def mamba2(c: Any) -> Model:
    unless(c.hidden_act not in ("silu", "swish"), f"a convolution with activation {c.hidden_act}")
    sizes, eps = (c.num_heads, c.head_dim, c.n_groups, c.state_size, c.conv_kernel), float(c.layer_norm_epsilon)
    facts = {"biases": (c.use_bias, c.use_bias, c.use_conv_bias), "limit": c.time_step_limit}

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return (Update((mixer(c, f"{p}.mixer", *sizes, eps, **facts),), Norm(f"{p}.norm", c.hidden_size, eps)),)

    return model(c, layer, Norm("norm_f", c.hidden_size, eps), embed="embeddings", prefix="backbone.")


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_heads": 128, "head_dim": 64, "state_size": 128,
    "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "n_groups": 8, "use_bias": False, "use_conv_bias": True,
    "hidden_act": "silu", "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
FAMILIES = (Family("mamba2", mamba2, DEFAULTS, sizes=(32768, 4096, None, 64, None, None, None)),)
