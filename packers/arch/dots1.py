"""dots.llm1 (Rednote): Qwen 3's attention, DeepSeek V3's mixtures."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, head_norms, mlp, model, pre_norm, window
from lowq_packers.arch.deepseek import by_sigmoid, mixture
from lowq_packers.arch.parts import Model, Update
from lowq_packers.arch.qwen2 import layer_types


def dots1(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, c.attention_bias, c.attention_bias, window=window(c, i), **head_norms(c, p))
        mix, path = i >= c.first_k_dense_replace, f"{p}.mlp"
        return pre_norm(c, p, a, mixture(c, path, by_sigmoid(c, path)) if mix else mlp(c, path))

    return model(c, layer)


DEFAULTS = {
    "eos_token_id": None, "tie_word_embeddings": False, "num_key_value_heads": 32, "hidden_act": "silu",
    "attention_bias": False, "moe_intermediate_size": 1408, "n_shared_experts": None, "n_routed_experts": None, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": None, "first_k_dense_replace": 0, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62, "layer_types": None,
}  # fmt: skip
SIZES = (152064, 4608, 10944, 62, 32, 2048, 1e-6)
FAMILIES = (Family("dots1", dots1, DEFAULTS, layer_types=layer_types, sizes=SIZES),)
