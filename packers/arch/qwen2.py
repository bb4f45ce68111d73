"""Qwen 2 and 2.5: biases of q, k and v; a window in the later layers, if the config switches it on; mixtures; vision models."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import (
    FULL,
    SLIDING,
    attention,
    experts,
    mlp,
    model,
    pre_norm,
    router,
    three_part,
    window,
    wrapper,
)
from lowq_packers.arch.parts import Experts, Mlp, Model, Update


def qwen2(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, bias=True, window=window(c, i)), mlp(c, f"{p}.mlp"))

    return model(c, layer)


def mimo(c: Any) -> Model:
    """Xiaomi's MiMo-7B: Qwen 2 with an MTP head."""
    return replace(qwen2(c), extra=("model.mtp_layers.",))


def sparse(c: Any, i: int) -> bool:
    """Whether layer i has experts: every decoder_sparse_step-th layer, except those in mlp_only_layers."""
    step, dense = getattr(c, "decoder_sparse_step", 1), getattr(c, "mlp_only_layers", None) or ()
    return i not in dense and c.num_experts > 0 and (i + 1) % step == 0


def mixture(c: Any, p: str, normalise: bool, shared: bool, **more: Any) -> Experts:
    """Qwen's experts at path `p`, with or without a gated shared expert. `more`: further fields of Experts."""
    of = router(c, f"{p}.gate", c.num_experts, normalise=normalise, rounded=True)
    shared_part: dict[str, Any] = {"shared": mlp(c, f"{p}.shared_expert", c.shared_expert_intermediate_size)} if shared else {}
    gate = f"{p}.shared_expert_gate" if shared else ""
    return experts(c, p, of, c.moe_intermediate_size, shared_gate=gate, **shared_part, **more)


def qwen2_moe(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        m: Mlp | Experts = mixture(c, f"{p}.mlp", c.norm_topk_prob, True) if sparse(c, i) else mlp(c, f"{p}.mlp")
        return pre_norm(c, p, attention(c, p, bias=c.qkv_bias, window=window(c, i)), m)

    return model(c, layer)


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, if config.json has no layer_types."""
    first = config["max_window_layers"] if config.get("sliding_window") is not None else config["num_hidden_layers"]
    return [SLIDING if i >= first else FULL for i in range(config["num_hidden_layers"])]


def layer_types_moe(config: Mapping[str, Any]) -> list[str]:
    """The same for qwen2_moe: every second of the first layers."""
    first = config["max_window_layers"] if config["use_sliding_window"] else 0
    return [SLIDING if i < first and i % 2 == 0 else FULL for i in range(config["num_hidden_layers"])]


DEFAULTS = {"eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 32, "hidden_act": "silu"}
WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
MOE = {
    "num_key_value_heads": 16, "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts": 60,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "norm_topk_prob": False, "mlp_only_layers": None,
    "qkv_bias": True,
}  # fmt: skip
VL = {"eos_token_id": 151645, "num_key_value_heads": 8, "hidden_act": "silu"} | WINDOW | {"max_window_layers": 80}
FILES = (("model.", "lm_head"),)
VL_TOP = {"tie_word_embeddings": False}
vl = wrapper(qwen2, "model.visual.", "visual.", files=FILES, images=three_part(151655, (16, 24, 24), False))
FAMILIES = (
    Family("qwen2", qwen2, DEFAULTS | WINDOW, gguf="qwen2", gguf_class="Qwen2ForCausalLM", mlx=True, layer_types=layer_types,
        sizes=(151936, 4096, 22016, 32, 32, 32768, 1e-6)),
    Family("mimo", mimo, DEFAULTS | WINDOW, layer_types=layer_types, sizes=(151936, 4096, 22016, 32, 32, 32768, 1e-6)),
    Family("qwen2_moe", qwen2_moe, DEFAULTS | WINDOW | MOE, mlx=True, layer_types=layer_types_moe,
        sizes=(151936, 2048, 5632, 24, 16, 32768, 1e-6)),
    Family("qwen2_vl_text", qwen2, VL, 1000000.0, layer_types=layer_types, sizes=(152064, 8192, 29568, 80, 64, 32768, 1e-5)),
    Family("qwen2_5_vl_text", qwen2, VL, 1000000.0, layer_types=layer_types, sizes=(152064, 8192, 29568, 80, 64, 32768, 1e-5)),
    Family("qwen2_vl", vl, VL_TOP, text="qwen2_vl_text", gguf="qwen2vl", gguf_class="Qwen2ForCausalLM"),
    Family("qwen2_5_vl", vl, VL_TOP, text="qwen2_5_vl_text", gguf="qwen2vl", gguf_class="Qwen2ForCausalLM"),
)  # fmt: skip
