"""Mixtral: Mistral with a mixture of experts in every layer. MiniMax M2: norms over all heads, scores by sigmoid."""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, experts, model, norms_of_all, pre_norm, rope, router
from lowq_packers.arch.parts import Experts, Model, Update

LEAVES = ("w1", "w3", "w2")
IN_FILES = (".mlp.gate.", ".block_sparse_moe.gate.")


def mixture(c: Any, p: str, **more: Any) -> Experts:
    """`more`: of the router."""
    of = router(c, f"{p}.mlp.gate", c.num_local_experts, **more)
    return experts(c, f"{p}.mlp", of, c.intermediate_size, LEAVES, files=f"{p}.block_sparse_moe.experts")


def mixtral(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        return pre_norm(c, p, attention(c, p, window=c.sliding_window or 0), mixture(c, p))

    return model(c, layer, renamed=(IN_FILES,))


def minimax_m2(c: Any) -> Model:
    share = c.rotary_dim / c.head_dim if getattr(c, "rotary_dim", None) else 1.0

    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, turned=rope(c, share=share), **norms_of_all(c, p))
        return pre_norm(c, p, a, mixture(c, p, score="sigmoid", bias=f"{p}.mlp.e_score_correction_bias"))

    bias = "e_score_correction_bias"
    return model(c, layer, renamed=(IN_FILES, (f".mlp.{bias}", f".block_sparse_moe.{bias}")))


DEFAULTS = {
    "eos_token_id": 2, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": 8, "sliding_window": None,
    "hidden_act": "silu", "num_experts_per_tok": 2, "num_local_experts": 8,
}  # fmt: skip
MINIMAX = {
    "eos_token_id": 200020, "tie_word_embeddings": False, "head_dim": 128, "num_key_value_heads": 8,
    "hidden_act": "silu", "num_experts_per_tok": 8, "num_local_experts": 256,
}  # fmt: skip
FAMILIES = (
    Family("mixtral", mixtral, DEFAULTS, 1000000.0, gguf="llama", mlx=True, sizes=(32000, 4096, 14336, 32, 32, 131072, 1e-5)),
    Family("minimax_m2", minimax_m2, MINIMAX, 5000000.0, sizes=(200064, 3072, 1536, 62, 48, 196608, 1e-6)),
)
