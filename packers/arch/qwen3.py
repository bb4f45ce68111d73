"""Qwen 3: norms of each head of q and k; a window in later layers, if the config switches it on; mixtures; vision models."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import STACKS, attention, head_norms, mlp, model, pre_norm, three_part, window, wrapper
from lowq_packers.arch.parts import Model, Update
from lowq_packers.arch.qwen2 import DEFAULTS, VL_TOP, WINDOW, layer_types, mixture, sparse


def qwen3(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        near = window(c, i) if getattr(c, "layer_types", None) else 0
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, window=near, **head_norms(c, p))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp"))

    return model(c, layer)


def qwen3_moe(c: Any, normalise: bool | None = None, **more: Any) -> Model:
    """normalise: whether weights sum to 1; None: as norm_topk_prob says. `more`: further fields of Experts."""
    normalise = c.norm_topk_prob if normalise is None else normalise

    def layer(i: int, p: str) -> tuple[Update, ...]:
        near = getattr(c, "sliding_window", None) or 0
        a = attention(c, p, bias=c.attention_bias, o_bias=c.attention_bias, window=near, **head_norms(c, p))
        stacks = {k: f"{p}.{v}" if k == "files" else v for k, v in more.items()}
        return pre_norm(c, p, a, mixture(c, f"{p}.mlp", normalise, False, **stacks) if sparse(c, i) else mlp(c, f"{p}.mlp"))

    return model(c, layer)


def qwen3_vl_moe_text(c: Any) -> Model:
    return qwen3_moe(c, True, stacked=True, leaves=STACKS, transposed="files")


MOE = {
    "num_key_value_heads": 4, "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
    "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    "norm_topk_prob": False, "mlp_only_layers": None,
}  # fmt: skip
VL = {"num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu", "attention_bias": False}
VL_MOE = {
    "eos_token_id": None, "num_key_value_heads": 16, "head_dim": None, "hidden_act": "silu", "attention_bias": False,
    "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
    "mlp_only_layers": None, "tie_word_embeddings": True,
}  # fmt: skip
OWN = {"head_dim": 128, "attention_bias": False}
PICTURES: dict[str, Any] = {"files": (), "images": three_part(151655, (24, 20, 20), True, deepstack=True)}
OF_QWEN3: dict[str, Any] = {"gguf": "qwen3", "gguf_class": "Qwen3ForCausalLM", "mlx": True}
FAMILIES = (
    Family("qwen3", qwen3, DEFAULTS | WINDOW | OWN, layer_types=layer_types, **OF_QWEN3,
        sizes=(151936, 4096, 22016, 32, 32, 32768, 1e-6)),
    Family("qwen3_moe", qwen3_moe, DEFAULTS | MOE, gguf="qwen3moe", mlx=True, sizes=(151936, 2048, 6144, 24, 32, 32768, 1e-6)),
    Family("qwen3_vl_text", qwen3, VL, 500000.0, sizes=(151936, 4096, 22016, 32, 32, 128000, 1e-6)),
    Family("qwen3_vl_moe_text", qwen3_vl_moe_text, VL_MOE, 500000.0, sizes=(151936, 2048, 5632, 24, 16, 128000, 1e-6)),
    Family("qwen3_vl", wrapper(qwen3, "model.visual.", **PICTURES), VL_TOP, text="qwen3_vl_text", gguf="qwen3vl",
        gguf_class="Qwen3ForCausalLM"),
    Family("qwen3_vl_moe", wrapper(qwen3_vl_moe_text, "model.visual.", **PICTURES), VL_TOP, text="qwen3_vl_moe_text",
        gguf="qwen3vlmoe"),
)  # fmt: skip
