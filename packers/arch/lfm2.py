"""LFM2: gated short convolutions in most layers, attention in the others. LFM2-MoE: experts in all but the first layers."""

from collections.abc import Callable, Mapping
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import FULL, attention, experts, head_dim, linear, mlp, model, router
from lowq_packers.arch.parts import Conv, Experts, Mixer, Mlp, Model, Norm, ShortConv, Update


def width(c: Any) -> int:
    """The inner size of the MLP: two thirds of the config's value, rounded up."""
    inner = getattr(c, "block_ff_dim", None) or c.intermediate_size
    if not c.block_auto_adjust_ff_dim:
        return int(inner)
    inner, to = int(2 * inner / 3), c.block_multiple_of
    return inner if c.block_ffn_dim_multiplier is None else -(-int(c.block_ffn_dim_multiplier * inner) // to) * to


def decoder(c: Any, feed: Callable[[int, str], Mlp | Experts]) -> Model:
    """feed: a function of a layer's number and path -> the mixer after its convolution or attention."""
    H, bias = c.hidden_size, bool(c.conv_bias)

    def norm(name: str, size: int = 0) -> Norm:
        return Norm(name, size or H, float(c.norm_eps))

    def mixer(i: int, p: str) -> Mixer:
        if c.layer_types[i] == FULL:
            norms: dict[str, Any] = {f"{n}_norm": norm(f"{p}.self_attn.{n}_layernorm", head_dim(c)) for n in "qk"}
            return attention(c, p, o="out_proj", **norms)
        into, out = linear(c, f"{p}.conv.in_proj", 3 * H, bias=bias), linear(c, f"{p}.conv.out_proj", H, bias=bias)
        return ShortConv(into, Conv(f"{p}.conv.conv", H, c.conv_L_cache, bias), out)

    def layer(i: int, p: str) -> tuple[Update, ...]:
        m = feed(i, f"{p}.feed_forward")
        return Update((mixer(i, p),), norm(f"{p}.operator_norm")), Update((m,), norm(f"{p}.ffn_norm"))

    return model(c, layer, norm("embedding_norm"))


def lfm2(c: Any) -> Model:
    return decoder(c, lambda i, p: mlp(c, p, width(c), ("w1", "w3"), "w2", activation="silu"))


def lfm2_moe(c: Any) -> Model:
    def feed(i: int, p: str) -> Mlp | Experts:
        if i < c.num_dense_layers:
            return mlp(c, p, 0, ("w1", "w3"), "w2", activation="silu")
        how = {"bias": f"{p}.expert_bias" if c.use_expert_bias else "", "normalise": c.norm_topk_prob, "sum_eps": 1e-6}
        of = router(c, f"{p}.gate", c.num_experts, score="sigmoid", factor=float(c.routed_scaling_factor), **how)
        return experts(c, p, of, c.moe_intermediate_size, ("w1", "w3", "w2"), activation="silu")

    return decoder(c, feed)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json lists the attention layers, or nothing."""
    n, full = config["num_hidden_layers"], config.get("full_attn_idxs")
    return [FULL if full is None or i in full else "conv" for i in range(n)]


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": True, "num_key_value_heads": 8, "norm_eps": 1e-5, "conv_bias": False,
    "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "layer_types": None,
}  # fmt: skip
MOE = {
    "eos_token_id": 2, "tie_word_embeddings": True, "num_key_value_heads": 8, "norm_eps": 1e-5, "conv_bias": False,
    "conv_L_cache": 3, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32,
    "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "layer_types": None,
}  # fmt: skip
FAMILIES = (
    Family("lfm2", lfm2, DEFAULTS, 1000000.0, layer_types=layer_types, sizes=(65536, 2560, 12288, 32, 32, 128000, None)),
    Family("lfm2_moe", lfm2_moe, MOE, 1000000.0, sizes=(65536, 2048, 7168, 32, 32, 128000, None)),
)
