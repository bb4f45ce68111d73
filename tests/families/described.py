"""Tiny configs and models of the described families, every fact of theirs switched on: windows, groups, biases, constants.

`tiny.py` makes a model of any family from its class's defaults; here values are such that a fact which is left out shows.
A name is a model_type, or one with a variant: "deepseek_v2/groups".
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 160
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), 0.02),
}  # fmt: skip
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_MOE = EXPERTS | {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]}
SHARED = {"shared_expert_intermediate_size": 48}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0}
LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, **EXPERTS,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
V3 = LATENT | GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
NO_RANK = {"q_lora_rank": None}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
}  # fmt: skip
CONSTANTS = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.15, "logits_scaling": 8.0,
    "attention_bias": True,
}  # fmt: skip
HYBRID = CONSTANTS | {
    "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_chunk_size": 8, "layer_types": [LINEAR, FULL] * 2,
}  # fmt: skip
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 24}
GEMMA4 = {
    "num_hidden_layers": 6, "sliding_window": 4, "layer_types": [SLIDING, SLIDING, FULL] * 2, "global_head_dim": 32,
    "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0,
}  # fmt: skip
A4B = {
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 6,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
E2B = {
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": True,
}  # fmt: skip
LLAMA4 = {
    "intermediate_size_mlp": 80, "num_local_experts": 6, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 4, "floor_scale": 4, "attn_scale": 0.3, "attention_bias": True,
}  # fmt: skip
FALCON = {
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_chunk_size": 8, "mamba_rms_norm": True, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    "mlp_multipliers": [0.8, 0.6], "key_multiplier": 0.5, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.7, "embedding_multiplier": 5.0, "lm_head_multiplier": 0.3,
    "attention_bias": True, "mlp_bias": True, "projectors_bias": True, "mamba_proj_bias": True,
}  # fmt: skip
NEMOTRON_H = EXPERTS | {
    "layers_block_type": [LINEAR, FULL, "mlp", "moe", LINEAR], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 16, "chunk_size": 8, "n_routed_experts": 8, "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 24, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
MINISTRAL3 = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}}
BIASES = {"attention_bias": True, "mlp_bias": True}
TEXTS: dict[str, dict[str, Any]] = {
    "llama": BIASES,
    "llama/tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "ministral": {"sliding_window": 4, "layer_types": [SLIDING, FULL] * 2},
    "ministral3": MINISTRAL3,
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    "phi": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 4, "original_max_position_embeddings": 256},
    "qwen2": WINDOW,
    "mimo": WINDOW,
    "qwen2_moe": QWEN_MOE | SHARED | WINDOW,
    "qwen3": WINDOW,
    "qwen3_moe": QWEN_MOE | {"decoder_sparse_step": 2},
    "gemma": {},
    "gemma2": GEMMA,
    "vaultgemma": GEMMA,
    "gemma3_text": GEMMA | {"layer_types": [SLIDING, FULL] * 2, "final_logit_softcapping": 3.0},
    "gemma4_text": GEMMA4 | A4B,
    "gemma4_text/31b": GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4_text/e2b": GEMMA4 | E2B,
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4},
    "qwen3_next": QWEN_MOE | SHARED | DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": QWEN_MOE | SHARED | DELTA,
    "deepseek_v2": LATENT | NO_RANK | {"topk_method": "greedy"},
    "deepseek_v2/groups": LATENT
    | {"n_group": 4, "topk_group": 1, "topk_method": "group_limited_greedy", "attention_bias": True},
    "deepseek_v3": V3,
    "deepseek_v3/halves": LATENT | NO_RANK | {"rope_interleave": False, "n_group": 1, "topk_group": 1},
    "kimi_k2": V3,
    "mistral4": LATENT | MINISTRAL3 | {"head_dim": 24},
    "glm": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": LATENT | {"head_dim": 16, "num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": LATENT | GROUPS,
    "llama4_text": LLAMA4,
    "granite": CONSTANTS | BIASES,
    "granitemoe": CONSTANTS | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoeshared": CONSTANTS | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "granitemoehybrid": HYBRID | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoehybrid/dense": HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    "nemotron": BIASES,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h/plain": NEMOTRON_H | {"moe_latent_size": None, "mlp_bias": True, "use_bias": True, "use_conv_bias": False},
    "falcon_h1": FALCON,
    "falcon_h1/gate_first": FALCON | {"mamba_norm_before_gate": False},
    "falcon_h1/no_norm": FALCON | {"mamba_rms_norm": False},
    "lfm2": {"layer_types": ["conv", FULL] * 2, "conv_bias": True, "block_multiple_of": 16},
    "lfm2/as_given": {"layer_types": ["conv", FULL] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": EXPERTS
    | {"layer_types": ["conv", FULL] * 2, "conv_bias": True, "num_experts": 6, "num_dense_layers": 1}
    | {"routed_scaling_factor": 2.5},
    "olmo": {"attention_bias": True, "clip_qkv": 0.5},
    "olmo2": {},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 4, "rope_scaling": YARN},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": {"sliding_window": 4, "logit_scale": 0.25},
    "smollm3": {"use_sliding_window": True, "sliding_window": 4, **BIASES},
    "starcoder2": {"sliding_window": 4},
    "exaone4": {"sliding_window": 4},
    "exaone4/no_window": {"sliding_window": None, "layer_types": [FULL] * 4},
    "exaone_moe": EXPERTS | GROUPS | {"sliding_window": 4, "num_experts": 8, "num_shared_experts": 2},
    "dots1": LATENT | GROUPS | {"head_dim": 16, "sliding_window": 4, "max_window_layers": 2, "norm_topk_prob": True},
    "solar_open": LATENT | GROUPS | {"head_dim": 16, "attention_bias": True},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm/side_by_side": {"use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "persimmon": {"num_key_value_heads": 4},
    "afmoe": EXPERTS
    | {"num_experts": 6, "num_shared_experts": 2, "sliding_window": 4, "mup_enabled": True, "route_scale": 2.5}
    | {"attention_bias": True},
    "mellum": EXPERTS
    | {"num_experts": 6, "sliding_window": 4, "layer_types": [SLIDING, FULL] * 2, "attention_bias": True}
    | {"mlp_layer_types": ["dense", "sparse"] * 2},
    "hy_v3": EXPERTS | BIASES | {"num_experts": 6, "num_shared_experts": 2},
    "minicpm3": LATENT | {"head_dim": None, "scale_emb": 12, "dim_model_base": 16},
    "youtu": LATENT | {"pad_token_id": None},  # whose class sets the row of a padding token to zero in loading
    "jais2": {"num_key_value_heads": 2},
    "hyperclovax": CONSTANTS | BIASES | {"logits_scaling": 0.125},
    "hyperclovax/no_post_norm": CONSTANTS | {"use_post_norm": False, "attention_multiplier": None},
    "internlm3": BIASES,
    "iquestcoder": {},
    "apertus": {"attention_bias": True},
    "helium": BIASES,
    "cwm": {"sliding_window": 4},
    "bamba": BIASES
    | {"attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
    | {"mamba_n_groups": 2, "mamba_proj_bias": True},
    "seed_oss": BIASES | {"attention_out_bias": True},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "use_bias": True},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": [1, 2, 2, 3]},
    "arcee": BIASES,
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox/one_after_the_other": {"use_parallel_residual": False, "rotary_pct": 1.0},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8, "use_bias": True},
}
COPIES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}  # model types of their own for another's class in transformers
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
WRAPPERS = {  # -> the text part above whose fields it has
    "gemma3": "gemma3_text", "mistral3": "mistral", "mistral3/ministral3": "ministral3", "mistral3/mistral4": "mistral4",
    "gemma4": "gemma4_text/e2b", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "llama4": "llama4_text", "kimi_k25": "deepseek_v3",
    "llava": "llama", "internvl": "qwen2",
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1, "num_heads": 2,
    "out_hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2, "projector_input_dim": 48, "projector_output_dim": 48,
    "vision_output_dim": 48, "embed_dim": 32, "deepstack_visual_indexes": [0],
}  # fmt: skip


def here(name: str) -> bool:
    """Whether the transformers that is installed has the model type of a name; the oldest lacks some."""
    return name.partition("/")[0] in {*CONFIG_MAPPING, *COPIES}


NAMES = tuple(filter(here, (*TEXTS, *WRAPPERS)))


def config(name: str, outer: dict[str, Any] | None = None, **more: Any) -> Any:
    """transformers' config of a name; `more` overrides fields, `outer` those of a wrapper outside its text_config."""
    model_type = name.partition("/")[0]
    model_type = COPIES.get(model_type, model_type)
    if name not in WRAPPERS:
        return CONFIG_MAPPING[model_type](**deepcopy({**BASE, **TEXTS[name], **more}))  # which they write into
    cls = CONFIG_MAPPING[model_type]
    own = cls().text_config.model_type if "/" not in name else name.partition("/")[2]
    text = {**BASE, **TEXTS[WRAPPERS[name]], **(MROPE if "_vl" in name else {}), "model_type": own, **more}
    return cls(text_config=deepcopy(text), vision_config=deepcopy(TOWER), **(outer or {}))


def model(name: str, seed: int = 0, made_of: Any = None, **more: Any) -> PreTrainedModel:
    """A random model of a name in fp32, every weight drawn so that none is 1 or 0, and large enough that each layer shows.

    made_of: its config, where it is not that of the name.
    """
    return _made(seed, made_of or config(name, **more)) if made_of or more else deepcopy(shared(name, seed))


@cache
def shared(name: str, seed: int = 0) -> PreTrainedModel:
    """The random model of a name, which `model` copies: for tests that write nothing into it."""
    return _made(seed, config(name))


def _made(seed: int, c: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    made = auto(c).from_config(c, dtype=torch.float32, attn_implementation="eager").eval()
    for tensor_name, t in made.state_dict().items():
        if t.is_floating_point():
            spread = 0.3 if t.squeeze().dim() < 2 else 1.5 * t.shape[-1] ** -0.5
            around = 1.0 if any(part in tensor_name for part in ("norm", "scal")) and not tensor_name.endswith("bias") else 0.0
            t.copy_(torch.randn_like(t) * spread + around)
    return made


def auto(c: Any) -> Any:
    """The auto class that makes a model of a config."""
    causal = type(c) in AutoModelForCausalLM._model_mapping and not hasattr(c, "text_config")
    return AutoModelForCausalLM if causal else AutoModelForImageTextToText
