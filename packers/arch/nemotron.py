"""Nemotron: layer norms of 1 + w, MLPs of squared ReLU. Nemotron-H: a layer is Mamba-2, attention, an MLP or experts."""

from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, experts, linear, mamba2, mlp, model, pre_norm, rope, router, unless
from lowq_packers.arch.deepseek import by_sigmoid
from lowq_packers.arch.parts import Experts, Mixer, Model, Norm, Update

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of hybrid_override_pattern


def nemotron(c: Any) -> Model:
    def norm(c: Any, name: str) -> Norm:
        return Norm(name, c.hidden_size, float(c.norm_eps), "layer", add_one=True, bias=True)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, turned=rope(c, share=0.5))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", names=("up_proj",), gated=False, bias=c.mlp_bias), norm)

    return model(c, layer, norm(c, "norm"))


def mixture(c: Any, p: str) -> Experts:
    up, act, d = ("up_proj",), c.mlp_hidden_act, c.moe_latent_size
    of = router(c, f"{p}.gate", c.n_routed_experts, factor=float(c.routed_scaling_factor), **by_sigmoid(c, p))
    shared = mlp(
        c, f"{p}.shared_experts", c.moe_shared_expert_intermediate_size, up, bias=c.mlp_bias, activation=act, gated=False
    )
    names = (("fc1_latent_proj", d, c.hidden_size), ("fc2_latent_proj", c.hidden_size, d))
    around = tuple(linear(c, f"{p}.{n}", rows, columns, bias=bool(c.mlp_bias)) for n, rows, columns in names) if d else None
    more = {"gated": False, "shared": shared, "latent": around, "hidden": d or c.hidden_size, "activation": act}
    return experts(c, p, of, c.moe_intermediate_size, ("up_proj", "down_proj"), **more)


def mixer(c: Any, kind: str, p: str) -> Mixer:
    if kind in ("linear_attention", "mamba"):
        unless(c.mamba_hidden_act != "silu", f"a convolution with activation {c.mamba_hidden_act}")
        sizes = (c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size, c.conv_kernel)
        limit = (c.time_step_min, float("inf"))  # the limits that transformers uses for prompts
        return mamba2(c, p, *sizes, c.layer_norm_epsilon, biases=(c.use_bias, c.use_bias, c.use_conv_bias), limit=limit)
    if kind in ("full_attention", "attention"):
        return attention(c, p.removesuffix(".mixer"), module="mixer", turned=None)
    if kind == "moe":
        return mixture(c, p)
    return mlp(c, p, names=("up_proj",), bias=c.mlp_bias, activation=c.mlp_hidden_act, gated=False)


def nemotron_h(c: Any) -> Model:
    kinds = c.layers_block_type or [PATTERN[k] for k in c.hybrid_override_pattern]

    def norm(name: str) -> Norm:
        return Norm(name, c.hidden_size, float(c.layer_norm_epsilon))

    def layer(i: int, p: str) -> tuple[Update, ...]:
        return (Update((mixer(c, kinds[i], f"{p}.mixer"),), norm(f"{p}.norm")),)

    more: dict[str, Any] = {"embed": "embeddings", "files": (("backbone.", "lm_head"),), "extra": ("mtp.",)}
    return replace(model(c, layer, norm("norm_f"), **more), tied=False)  # transformers' class never ties the head


DEFAULTS = {
    "eos_token_id": 3, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": None, "hidden_act": "relu2",
    "norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
HYBRID = {
    "eos_token_id": 2, "tie_word_embeddings": False, "layers_block_type": None, "num_key_value_heads": 8, "head_dim": 128,
    "mlp_hidden_act": "relu2", "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "use_conv_bias": True,
    "n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
FAMILIES = (
    Family("nemotron", nemotron, DEFAULTS, sizes=(256000, 6144, 24576, 32, 48, 4096, None)),
    Family("nemotron_h", nemotron_h, HYBRID, sizes=(131072, 4096, 21504, None, 32, 4096, None)),
)
