"""config.json of one published size of each described family, fields that shape nothing left out; numbers as published.

A name is a model_type, or one with a variant. `BILLIONS` has their parameters, towers and heads for further tokens left out.
"""

from typing import Any

S, F = "sliding_attention", "full_attention"


def sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    """The fields of every config.json."""
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, **more,
    }  # fmt: skip


def moe(experts: int, top_k: int, inner: int, field: str = "num_experts", **more: Any) -> dict[str, Any]:
    """The fields of configs with experts."""
    return {field: experts, "num_experts_per_tok": top_k, "moe_intermediate_size": inner, **more}


def latent(q: int | None, kv: int, nope: int, rotated: int, v: int) -> dict[str, Any]:
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return dict(zip(names, (q, kv, nope, rotated, v), strict=True))


def delta(keys: int, values: int) -> dict[str, Any]:
    return {
        "linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": 256,
    }  # fmt: skip


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7}
QWEN_TEXT = {"rope_parameters": MROPE | {"partial_rotary_factor": 0.25}, "mamba_ssm_dtype": "float32"}
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "deepstack_visual_indexes": [8, 16, 24]}
V3 = sizes(
    129280, 7168, 18432, 61, 128, 128, **moe(256, 8, 2048, "n_routed_experts"), **latent(1536, 512, 128, 64, 128),
    n_shared_experts=1, first_k_dense_replace=3, n_group=8, topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True,
    num_nextn_predict_layers=1, rope_theta=10000, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    rms_norm_eps=1e-6, max_position_embeddings=163840, topk_method="noaux_tc", scoring_func="sigmoid",
)  # fmt: skip
K2 = V3 | sizes(163840, 7168, 18432, 61, 64, 64, **moe(384, 8, 2048, "n_routed_experts")) | {
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0, "rope_scaling": YARN | {"factor": 32, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
LLAMA4 = sizes(
    202048, 5120, 8192, 48, 40, 8, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1,
    interleave_moe_layer_step=1, use_qk_norm=True, attention_chunk_size=8192, rms_norm_eps=1e-5, rope_theta=500000.0,
    rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    | {"original_max_position_embeddings": 8192},
    max_position_embeddings=10485760, attn_scale=0.1, floor_scale=8192, attn_temperature_tuning=True,
)  # fmt: skip
GEMMA4 = {
    "head_dim": 256, "global_head_dim": 512, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0, "max_position_embeddings": 262144, "use_bidirectional_attention": "vision",
    "rope_parameters": {
        F: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        S: {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip
LARGE4 = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "sliding_window": 1024}
E2B = sizes(262144, 1536, 6144, 35, 8, 1, **GEMMA4) | {
    "sliding_window": 512, "num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256, "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 262144, "layer_types": [S, S, S, S, F] * 7, "use_bidirectional_attention": None,
}  # fmt: skip
MISTRAL4_ROPE = {
    "rope_type": "yarn", "type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.5, "max_position_embeddings": 1048576,
}  # fmt: skip
QWEN25 = sizes(
    152064, 3584, 18944, 28, 28, 4, rms_norm_eps=1e-6, rope_theta=1000000.0, max_position_embeddings=32768,
    sliding_window=131072, use_sliding_window=False, max_window_layers=28,
)  # fmt: skip
QWEN3 = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "max_position_embeddings": 40960,
}
VL = {"rope_theta": 5e6, "rope_scaling": MROPE | {"mrope_section": [24, 20, 20]}}
QWEN3_30B = moe(128, 8, 768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
GRANITE = {
    "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "attention_bias": False, "rope_theta": 10000000.0, "max_position_embeddings": 131072,
}  # fmt: skip
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
FALCON = {
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.1171875, "key_multiplier": 0.02209708691207961,
    "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.013020833333333334,
    "mlp_multipliers": [0.8838834764831844, 0.2916666666666667], "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.11785113019775793,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
}  # fmt: skip
WINDOWED = {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": sizes(128256, 4096, 14336, 32, 32, 8, rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=131072)
    | {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
       | {"original_max_position_embeddings": 8192}},
    "mistral": sizes(32000, 4096, 14336, 32, 32, 8, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096)
    | {"max_position_embeddings": 32768},
    "ministral": sizes(131072, 4096, 12288, 36, 32, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e8, sliding_window=32768)
    | {"max_position_embeddings": 131072, "layer_types": [F, S, S, S] * 9},
    "ministral3": sizes(131072, 12288, 28672, 88, 96, 8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=262144)
    | {"rope_parameters": {"type": "yarn", "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
       | {"rope_theta": 1e6, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
       | {"llama_4_scaling_beta": 0.0}, "sliding_window": None},
    "mistral3": {
        "text_config": sizes(131072, 5120, 32768, 40, 32, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e9)
        | {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 131072}, "tie_word_embeddings": False,
    },
    "llava": {
        "text_config": sizes(32064, 4096, 11008, 32, 32, 32, rms_norm_eps=1e-5, max_position_embeddings=4096)
        | {"model_type": "llama"},
    },
    "internvl": {"text_config": QWEN25 | {"model_type": "qwen2", "vocab_size": 151674}, "tie_word_embeddings": False},
    "mixtral": sizes(32000, 4096, 14336, 32, 32, 8, rms_norm_eps=1e-5, rope_theta=1e6, max_position_embeddings=32768)
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "minimax_m2": sizes(200064, 3072, 1536, 62, 48, 8, head_dim=128, rms_norm_eps=1e-6, rope_theta=5000000, rotary_dim=64)
    | {"num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608},
    "phi": sizes(51200, 2560, 10240, 32, 32, 32, partial_rotary_factor=0.4, max_position_embeddings=2048),
    "phi3": sizes(32064, 3072, 8192, 32, 32, 32, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=2047)
    | {"max_position_embeddings": 4096},
    "qwen2": QWEN25,
    "mimo": sizes(151680, 4096, 11008, 36, 32, 8, rms_norm_eps=1e-5, rope_theta=640000, max_position_embeddings=32768)
    | {"use_sliding_window": False, "num_nextn_predict_layers": 1, "tie_word_embeddings": False},
    "qwen2_moe": sizes(151936, 2048, 5632, 24, 16, 16, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=8192)
    | moe(60, 4, 1408, shared_expert_intermediate_size=5632, norm_topk_prob=False, decoder_sparse_step=1)
    | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21},
    "qwen2_vl": QWEN25 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {}},
    "qwen2_5_vl": QWEN25 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {}},
    "qwen3": sizes(151936, 4096, 12288, 36, 32, 8, **QWEN3, use_sliding_window=False, sliding_window=None)
    | {"max_window_layers": 36},
    "qwen3_moe": sizes(151936, 2048, 6144, 48, 32, 4, **QWEN3, **QWEN3_30B),
    "qwen3_vl": {"text_config": sizes(151936, 4096, 12288, 36, 32, 8, **QWEN3) | VL, "vision_config": TOWER},
    "qwen3_vl_moe": {
        "text_config": sizes(151936, 2048, 6144, 48, 32, 4, **QWEN3) | QWEN3_30B | VL, "vision_config": TOWER,
    },
    "qwen3_next": sizes(151936, 2048, 5120, 48, 16, 2, rms_norm_eps=1e-6, rope_theta=10000000, partial_rotary_factor=0.25)
    | delta(16, 32) | moe(512, 10, 512, shared_expert_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1)
    | {"max_position_embeddings": 262144},
    "qwen3_5_text": sizes(248320, 4096, 12288, 32, 16, 4, rms_norm_eps=1e-6, **QWEN_TEXT) | delta(16, 32)
    | {"max_position_embeddings": 262144},
    "qwen3_5": {
        "text_config": sizes(248320, 5120, 17408, 64, 24, 4, rms_norm_eps=1e-6, **QWEN_TEXT) | delta(16, 48)
        | {"max_position_embeddings": 262144, "mtp_num_hidden_layers": 1}, "vision_config": {},
    },
    "qwen3_5_moe": {
        "text_config": sizes(248320, 2048, 512, 40, 16, 2, rms_norm_eps=1e-6, **QWEN_TEXT) | delta(16, 32)
        | moe(256, 8, 512, shared_expert_intermediate_size=512) | {"max_position_embeddings": 262144}, "vision_config": {},
    },
    "gemma": sizes(256000, 3072, 24576, 28, 16, 16, head_dim=256, rms_norm_eps=1e-6, hidden_act="gelu")
    | {"max_position_embeddings": 8192},
    "gemma2": sizes(256000, 3584, 14336, 42, 16, 8, head_dim=256, **WINDOWED, query_pre_attn_scalar=256, sliding_window=4096)
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
    "gemma3_text": sizes(262144, 1152, 6912, 26, 4, 1, head_dim=256, **WINDOWED, query_pre_attn_scalar=256, sliding_window=512)
    | {"sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000},
    "gemma3": {
        "text_config": sizes(262208, 5376, 21504, 62, 32, 16, head_dim=128, **WINDOWED, query_pre_attn_scalar=168)
        | {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
        | {"image_size": 896, "patch_size": 14},
    },
    "gemma4": {
        "text_config": sizes(262144, 5376, 21504, 60, 32, 16, **GEMMA4, **LARGE4, num_global_key_value_heads=4)
        | {"layer_types": [S, S, S, S, S, F] * 10}, "vision_config": None, "audio_config": None,
    },
    "gemma4/26b-a4b": {
        "text_config": sizes(262144, 2816, 2112, 30, 16, 8, **GEMMA4, **LARGE4, num_global_key_value_heads=2)
        | {"layer_types": [S, S, S, S, S, F] * 5, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
        | {"moe_intermediate_size": 704}, "vision_config": None, "audio_config": None,
    },
    "gemma4/e2b": {"text_config": E2B, "vision_config": None, "audio_config": None},
    "gemma4_text": E2B,
    "gpt_oss": sizes(201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, rms_norm_eps=1e-5)
    | {"layer_types": [S, F] * 12, "sliding_window": 128, "rope_theta": 150000, "swiglu_limit": 7.0, "attention_bias": True}
    | {"rope_scaling": YARN | {"rope_type": "yarn", "factor": 32.0, "truncate": False}, "max_position_embeddings": 131072},
    "deepseek_v2": sizes(102400, 2048, 10944, 27, 16, 16, **moe(64, 6, 1408, "n_routed_experts"))
    | latent(None, 512, 128, 64, 128) | {"n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy"}
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "rms_norm_eps": 1e-6}
    | {"rope_theta": 10000, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
    | {"max_position_embeddings": 163840},
    "deepseek_v3": V3,
    "kimi_k2": K2,
    "kimi_k25": {"text_config": K2 | {"model_type": "deepseek_v3"}, "tie_word_embeddings": False},
    "mistral4": sizes(131072, 4096, 12288, 36, 32, 32, **moe(128, 4, 2048, "n_routed_experts"), rms_norm_eps=1e-6)
    | latent(1024, 256, 64, 64, 128)
    | {"rope_parameters": MISTRAL4_ROPE},
    "glm": sizes(151552, 4096, 13696, 40, 32, 2, head_dim=128, rms_norm_eps=1.5625e-7, partial_rotary_factor=0.5)
    | {"attention_bias": True, "rope_theta": 10000.0, "max_position_embeddings": 131072},
    "glm4": sizes(151552, 4096, 13696, 40, 32, 2, head_dim=128, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    | {"attention_bias": True, "rope_theta": 10000.0, "max_position_embeddings": 32768},
    "glm4_moe": sizes(151552, 4096, 10944, 46, 96, 8, head_dim=128, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    | moe(128, 8, 1408, "n_routed_experts", n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=False, norm_topk_prob=True)
    | {"attention_bias": True, "n_group": 1, "topk_group": 1, "rope_theta": 1000000, "num_nextn_predict_layers": 1}
    | {"max_position_embeddings": 131072},
    "glm4_moe_lite": sizes(154880, 2048, 10240, 47, 20, 20, **moe(64, 4, 1536, "n_routed_experts"), rms_norm_eps=1e-5)
    | latent(768, 512, 192, 64, 256) | {"n_shared_experts": 1, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "rope_theta": 1000000, "num_nextn_predict_layers": 1},
    "llama4_text": LLAMA4,
    "llama4": {"text_config": LLAMA4, "vision_config": {}},
    "granite": sizes(49159, 4096, 12800, 40, 32, 8, **GRANITE, logits_scaling=16.0),
    "granitemoe": sizes(49155, 1536, 512, 32, 24, 8, **GRANITE, logits_scaling=6.0)
    | {"num_local_experts": 40, "num_experts_per_tok": 8},
    "granitemoehybrid": sizes(100352, 1536, 512, 40, 12, 4, **GRANITE, logits_scaling=6, num_local_experts=64)
    | {"num_experts_per_tok": 6, "shared_intermediate_size": 1024, "position_embedding_type": "nope", "mamba_expand": 2}
    | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1}
    | {"layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)]},
    "nemotron": sizes(256000, 3072, 9216, 32, 24, 8, head_dim=128, norm_eps=1e-5, partial_rotary_factor=0.5)
    | {"hidden_act": "relu2", "rope_theta": 10000, "max_position_embeddings": 4096},
    "nemotron_h": sizes(131072, 2688, 1856, len(PATTERN), 32, 2, head_dim=128, **moe(128, 6, 1856, "n_routed_experts"))
    | {"hybrid_override_pattern": PATTERN, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
    | {"conv_kernel": 4, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    | {"layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "use_conv_bias": True, "time_step_limit": [0.0, float("inf")]},
    "falcon_h1": sizes(130048, 3072, 12288, 44, 12, 2, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e11, **FALCON)
    | {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1}
    | {"mamba_d_conv": 4, "mamba_rms_norm": False, "mamba_norm_before_gate": False, "max_position_embeddings": 262144},
    "lfm2": sizes(65536, 2048, 12288, 16, 32, 8, norm_eps=1e-5, rope_theta=1000000.0, block_ff_dim=12288, conv_L_cache=3)
    | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    | {"max_position_embeddings": 128000},
    "lfm2_moe": sizes(65536, 2048, 7168, 24, 32, 8, norm_eps=1e-5, rope_theta=1000000.0, conv_L_cache=3, conv_bias=False)
    | {"layer_types": [F if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)], "max_position_embeddings": 128000}
    | moe(32, 4, 1792, num_dense_layers=2, use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=1.0),
    "olmo": sizes(50304, 4096, 11008, 32, 32, 32, rope_theta=10000.0, clip_qkv=None, max_position_embeddings=2048),
    "flex_olmo": sizes(100352, 4096, 11008, 32, 32, 32, rms_norm_eps=1e-6, rope_theta=500000, max_position_embeddings=4096)
    | {"num_experts": 7, "num_experts_per_tok": 5},
    "olmo2": sizes(100352, 4096, 11008, 32, 32, 32, rms_norm_eps=1e-6, rope_theta=500000, max_position_embeddings=4096),
    "olmoe": sizes(50304, 2048, 1024, 16, 16, 16, rms_norm_eps=1e-5, rope_theta=10000.0, clip_qkv=None, norm_topk_prob=False)
    | {"num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096},
    "olmo3": sizes(100278, 4096, 11008, 32, 32, 32, rms_norm_eps=1e-6, rope_theta=500000, sliding_window=4096)
    | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}}
    | {"layer_types": [S, S, S, F] * 8, "max_position_embeddings": 65536},
    "cohere": sizes(256000, 8192, 22528, 40, 64, 64, layer_norm_eps=1e-5, rope_theta=8000000.0, logit_scale=0.0625)
    | {"max_position_embeddings": 8192},
    "cohere2": sizes(256000, 4096, 14336, 32, 32, 8, layer_norm_eps=1e-5, rope_theta=50000, logit_scale=0.25)
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 8192},
    "smollm3": sizes(128256, 2048, 11008, 36, 16, 4, rms_norm_eps=1e-6, rope_theta=5000000.0, tie_word_embeddings=True)
    | {"no_rope_layers": [1, 1, 1, 0] * 9, "max_position_embeddings": 65536},
    "starcoder2": sizes(49152, 4608, 18432, 32, 36, 4, norm_epsilon=1e-5, rope_theta=1000000, sliding_window=4096)
    | {"use_bias": True, "max_position_embeddings": 16384},
    "exaone4": sizes(102400, 5120, 27392, 64, 40, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000, sliding_window=4096)
    | {"layer_types": [S, S, S, F] * 16, "sliding_window_pattern": "LLLG", "max_position_embeddings": 131072},
    "exaone_moe": sizes(153600, 6144, 18432, 48, 64, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000, sliding_window=128)
    | moe(128, 8, 2048, num_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True)
    | {"layer_types": [S, S, S, F] * 12, "sliding_window_pattern": "LLLG", "max_position_embeddings": 262144},
    "dots1": sizes(152064, 4096, 10944, 62, 32, 32, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000000, sliding_window=None)
    | moe(128, 6, 1408, "n_routed_experts", n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True)
    | {"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "max_position_embeddings": 32768},
    "solar_open": sizes(196608, 4096, 10240, 48, 64, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000)
    | moe(128, 8, 1280, "n_routed_experts", n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.0)
    | {"max_position_embeddings": 131072},
    "stablelm": sizes(100352, 2048, 5632, 24, 32, 32, layer_norm_eps=1e-5, partial_rotary_factor=0.25, use_qkv_bias=True)
    | {"rope_theta": 10000, "max_position_embeddings": 4096},
    "persimmon": sizes(262144, 4096, 16384, 36, 64, 64, layer_norm_eps=1e-5, partial_rotary_factor=0.5, rope_theta=25000.0)
    | {"qk_layernorm": True, "hidden_act": "relu2", "max_position_embeddings": 16384},
    "minicpm3": sizes(73448, 2560, 6400, 62, 40, 40, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=32768)
    | latent(768, 256, 64, 32, 64) | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True},
    "internlm3": sizes(128512, 4096, 10240, 48, 32, 2, head_dim=128, rms_norm_eps=1e-5, rope_theta=50000000, bias=False)
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "qkv_bias": False, "max_position_embeddings": 32768},
    "iquestcoder": sizes(76800, 5120, 27648, 80, 40, 8, head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=131072),
    "apertus": sizes(131072, 4096, 21504, 32, 32, 8, rms_norm_eps=1e-5, rope_theta=12000000, hidden_act="xielu")
    | {"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
       | {"original_max_position_embeddings": 8192}, "max_position_embeddings": 65536},
    "helium": sizes(48000, 2560, 7040, 24, 20, 20, head_dim=128, rms_norm_eps=1e-8, rope_theta=100000.0)
    | {"max_position_embeddings": 4096},
    "cwm": sizes(128256, 6144, 21504, 64, 48, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=8192)
    | {"rope_scaling": {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
       | {"original_max_position_embeddings": 8192}, "layer_types": [F, S, S, S] * 16, "max_position_embeddings": 131072},
    "bamba": sizes(128256, 4096, 14336, 32, 32, 8, rms_norm_eps=1e-5, attn_layer_indices=[9, 18, 27], attn_rotary_emb=64)
    | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1}
    | {"mamba_expand": 2, "max_position_embeddings": 262144},
    "seed_oss": sizes(155136, 5120, 27648, 64, 80, 8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e7, attention_bias=True),
    "ernie4_5": sizes(103424, 1024, 3072, 18, 16, 2, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0, use_bias=False),
    "ernie4_5_moe": sizes(103424, 2560, 12288, 28, 20, 4, rms_norm_eps=1e-5, rope_theta=500000.0, moe_num_experts=64, moe_k=6)
    | {"moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 27},
    "hunyuan_v1_dense": sizes(128167, 4096, 14336, 32, 32, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0)
    | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "tie_word_embeddings": True},
    "hunyuan_v1_moe": sizes(128167, 4096, 3072, 32, 32, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0)
    | {"num_experts": 64, "moe_topk": [8] * 32, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    | {"tie_word_embeddings": True},
    "arcee": sizes(128004, 2560, 18432, 36, 20, 4, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="relu2")
    | {"rope_scaling": YARN | {"factor": 20.0, "mscale": 1.0}, "max_position_embeddings": 65536},
    "gpt_neox": sizes(50432, 4096, 16384, 32, 32, 32, layer_norm_eps=1e-5, rotary_pct=0.25, rotary_emb_base=10000),
    "mamba2": {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64}
    | {"n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2, "tie_word_embeddings": False},
}  # fmt: skip
# Families with no config here, whose published numbers are not certain: what their files hold besides their class's sizes
CLASS_SIZES: dict[str, dict[str, object]] = {
    **{name: {} for name in ("afmoe", "granitemoeshared", "hy_v3", "hyperclovax", "jais2", "vaultgemma", "youtu")},
    "mellum": {"rope_parameters": {f"{kind}_attention": {"rope_type": "default", "rope_theta": base}
        for kind, base in (("full", 500000.0), ("sliding", 10000.0))}},
}  # fmt: skip
BILLIONS = {
    "llama": 8.03, "mistral": 7.24, "ministral": 8.02, "ministral3": 125, "mistral3": 23.6, "llava": 6.74,
    "internvl": 7.61, "mixtral": 46.7, "minimax_m2": 229,
    "phi": 2.78, "phi3": 3.82, "qwen2": 7.62, "mimo": 7.62, "qwen2_moe": 14.3, "qwen2_vl": 7.62, "qwen2_5_vl": 7.62,
    "qwen3": 8.19,
    "qwen3_moe": 30.5, "qwen3_vl": 8.19, "qwen3_vl_moe": 30.5, "qwen3_next": 79.7, "qwen3_5_text": 8.95, "qwen3_5": 26.9,
    "qwen3_5_moe": 34.7, "gemma": 8.54, "gemma2": 9.24, "gemma3_text": 1.0, "gemma3": 27.0, "gemma4": 30.7,
    "gemma4/26b-a4b": 25.2, "gemma4/e2b": 4.63, "gemma4_text": 4.63, "gpt_oss": 20.9, "deepseek_v2": 15.7, "deepseek_v3": 671,
    "kimi_k2": 1026, "kimi_k25": 1026, "mistral4": 119, "glm": 9.4, "glm4": 9.4, "glm4_moe": 106.9, "glm4_moe_lite": 29.9,
    "llama4_text": 107.8, "llama4": 107.8, "granite": 8.17, "granitemoe": 3.3, "granitemoehybrid": 6.94, "nemotron": 4.19,
    "nemotron_h": 31.6, "falcon_h1": 7.59, "lfm2": 1.17, "olmo2": 7.3, "olmo3": 7.3, "olmoe": 6.92, "cohere": 35.0,
    "cohere2": 8.03, "smollm3": 3.08, "starcoder2": 7.17, "exaone4": 32.0, "seed_oss": 36.2, "ernie4_5": 0.361,
    "lfm2_moe": 8.34, "olmo": 6.89, "flex_olmo": 33.3, "exaone_moe": 236.6, "dots1": 142.8, "solar_open": 102.6,
    "stablelm": 1.64, "persimmon": 9.4, "minicpm3": 4.07, "internlm3": 8.80, "iquestcoder": 39.8, "apertus": 8.05,
    "helium": 2.17, "cwm": 32.6, "bamba": 9.78,
    "ernie4_5_moe": 21.8, "hunyuan_v1_dense": 7.5, "hunyuan_v1_moe": 80.4, "arcee": 4.62, "gpt_neox": 6.86, "mamba2": 7.29,
}  # fmt: skip
