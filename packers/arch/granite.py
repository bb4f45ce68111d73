"""Granite: Llama with four constant factors. Its mixtures, with and without a shared MLP.

Its hybrids have Mamba-2 layers and a few attention layers. HyperCLOVA X: Granite with norms also after each half.
"""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, experts, head_dim, mamba2, mlp, model, pre_norm, rms, rope, router, unless
from lowq_packers.arch.parts import Attention, Experts, Mixer, Mlp, Model, Update

ROUTER = (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight")
LEAVES = ("input_linear.weight", "output_linear.weight")


def attend(c: Any, p: str, **more: Any) -> Attention:
    return attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, scale=float(c.attention_multiplier), **more)


def scaled(c: Any) -> dict[str, Any]:
    """The factors of the embeddings and of the logits."""
    return {"embed_scale": float(c.embedding_multiplier), "logit_scale": 1.0 / c.logits_scaling}


def granite(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attend(c, p), mlp(c, f"{p}.mlp", bias=c.mlp_bias), scale=float(c.residual_multiplier))

    return model(c, layer, **scaled(c))


def hyperclovax(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        more = {"bias": c.attention_bias, "o_bias": c.attention_bias}
        a = attention(c, p, scale=c.attention_multiplier or head_dim(c) ** -0.5, **more)
        names = ("input_layernorm", "post_attention_layernorm", "post_norm1", "post_norm2")
        first, second, *after = (rms(c, f"{p}.{n}") for n in names)
        post = after if c.use_post_norm else (None, None)
        m, scale = mlp(c, f"{p}.mlp", bias=c.mlp_bias), float(c.residual_multiplier)
        return Update((a,), first, post[0], scale), Update((m,), second, post[1], scale)

    return model(c, layer, embed_scale=float(c.embedding_multiplier), logit_scale=float(c.logits_scaling))


def mixture(c: Any, p: str, **more: Any) -> Experts:
    of = router(c, f"{p}.block_sparse_moe.router", c.num_local_experts, rounded=True)
    files = f"{p}.block_sparse_moe"
    return experts(c, files, of, c.intermediate_size, LEAVES, files=files, stacked=True, **more)


def granitemoe(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attend(c, p), mixture(c, p), scale=float(c.residual_multiplier))

    return model(c, layer, renamed=(ROUTER,), **scaled(c))


def granitemoeshared(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        inner = c.shared_intermediate_size
        shared = mlp(c, f"{p}.shared_mlp", inner, ("input_linear",), "output_linear") if inner else None
        return pre_norm(c, p, attend(c, p), mixture(c, p, shared=shared), scale=float(c.residual_multiplier))

    return model(c, layer, renamed=(ROUTER,), **scaled(c))


def granitemoehybrid(c: Any) -> Model:
    sizes = (
        c.mamba_n_heads,
        c.mamba_expand * c.hidden_size // c.mamba_n_heads,
        c.mamba_n_groups,
        c.mamba_d_state,
        c.mamba_d_conv,
    )
    biases, kinds = (c.mamba_proj_bias, c.mamba_proj_bias, c.mamba_conv_bias), c.layer_types or ["mamba"] * c.num_hidden_layers
    turned = rope(c) if c.position_embedding_type == "rope" else None

    def layer(i: int, p: str) -> tuple[Update, ...]:
        shared = mlp(c, f"{p}.shared_mlp", c.shared_intermediate_size, ("input_linear",), "output_linear")
        second: Mlp | Experts = mixture(c, p, shared=shared) if c.num_local_experts else shared
        state = kinds[i] in ("mamba", "linear_attention")
        unless(state and c.hidden_act not in ("silu", "swish"), f"a convolution with activation {c.hidden_act}")
        more = {"biases": biases, "limit": c.time_step_limit}
        first: Mixer = mamba2(c, f"{p}.mamba", *sizes, c.rms_norm_eps, **more) if state else attend(c, p, turned=turned)
        return pre_norm(c, p, first, second, scale=float(c.residual_multiplier))

    return model(c, layer, renamed=(ROUTER,), **scaled(c))


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "num_key_value_heads": None, "attention_bias": False,
    "hidden_act": "silu", "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}  # fmt: skip
MOE = DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2}
CLOVA = DEFAULTS | {"mlp_bias": False, "attention_multiplier": None, "head_dim": None, "use_post_norm": True}
SHARED = MOE | {"shared_intermediate_size": 0}
HYBRID = MOE | {
    "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None, "mamba_n_heads": 128,
    "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
FAMILIES = (
    Family("granite", granite, DEFAULTS | {"mlp_bias": False}, sizes=(32000, 4096, 11008, 32, 32, 2048, 1e-6)),
    Family("hyperclovax", hyperclovax, CLOVA, sizes=(32000, 4096, 11008, 32, 32, 2048, 1e-6)),
    Family("granitemoe", granitemoe, MOE, sizes=(32000, 4096, 11008, 32, 32, 2048, 1e-6)),
    Family("granitemoeshared", granitemoeshared, SHARED, sizes=(32000, 4096, 11008, 32, 32, 2048, 1e-6)),
    Family("granitemoehybrid", granitemoehybrid, HYBRID, sizes=(32000, 4096, 11008, 32, 32, 2048, 1e-6)),
)
