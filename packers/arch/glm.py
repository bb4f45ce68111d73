"""GLM-4: Llama with RoPE on neighbouring pairs; since version 0414 with norms before and after each half.

GLM-4.5: DeepSeek V3's mixtures. GLM-4.7-Flash: also DeepSeek V3's attention.
"""

from typing import Any

from lowq_packers.arch import Family
from lowq_packers.arch.common import attention, head_norms, mlp, model, pre_norm, rms, rope
from lowq_packers.arch.deepseek import by_sigmoid, decoder, latent, mixture
from lowq_packers.arch.parts import Attention, Model, Update


def glm(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, turned=rope(c, pairing="neighbours", share=0.5))
        return pre_norm(c, p, a, mlp(c, f"{p}.mlp", names=("gate_up_proj",)))

    return model(c, layer)


def glm4(c: Any) -> Model:
    def layer(i: int, p: str) -> tuple[Update, ...]:
        a = attention(c, p, bias=c.attention_bias, turned=rope(c, pairing="neighbours", share=0.5))
        m = mlp(c, f"{p}.mlp", names=("gate_up_proj",))
        names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
        before, after, then, last = (rms(c, f"{p}.{n}") for n in names)
        return Update((a,), before, after), Update((m,), then, last)

    return model(c, layer)


def glm4_moe(c: Any) -> Model:
    def attend(module: str) -> Attention:
        p = module.removesuffix(".self_attn")
        norms = head_norms(c, p) if c.use_qk_norm else {}
        return attention(c, p, bias=c.attention_bias, turned=rope(c, share=0.5), **norms)

    return decoder(c, attend, lambda p: mixture(c, p, by_sigmoid(c, p)))


def glm4_moe_lite(c: Any) -> Model:
    pairing = "neighbours" if c.rope_interleave else "halves"
    return decoder(c, lambda p: latent(c, p, pairing), lambda p: mixture(c, p, by_sigmoid(c, p)))


DEFAULTS = {"tie_word_embeddings": False, "hidden_act": "silu"}
GLM4 = DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}
MOE = DEFAULTS | {
    "eos_token_id": None, "num_key_value_heads": 8, "attention_bias": False, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
LITE = DEFAULTS | {
    "eos_token_id": 1, "num_key_value_heads": 20, "attention_bias": False, "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "qk_nope_head_dim": 192, "rope_interleave": True, "mlp_layer_types": None,
}  # fmt: skip
FAMILIES = (
    Family("glm", glm, GLM4, sizes=(151552, 4096, 13696, 40, 32, 131072, 1.5625e-7)),
    Family("glm4", glm4, GLM4, sizes=(151552, 4096, 13696, 40, 32, 131072, 1.5625e-7)),
    Family("glm4_moe", glm4_moe, MOE, sizes=(151552, 4096, 10944, 46, 96, 131072, 1e-5)),
    Family("glm4_moe_lite", glm4_moe_lite, LITE, sizes=(154880, 2048, 10240, 47, 20, 202752, 1e-5)),
)
