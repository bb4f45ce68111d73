"""A tiny random model of every causal language model that the installed transformers has: its default config, made small."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

WIDTH, INNER, HEADS, KV, HEAD, LAYERS, EXPERTS, VOCAB, LENGTH = 64, 96, 4, 2, 16, 2, 4, 160, 128
SIZES = {  # a field of a config -> its value in a tiny one; what is not named here or in ODD stays as it is
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), WIDTH
    ),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "input_embedding_size", "output_embedding_size"), WIDTH),
    **dict.fromkeys(("hidden_size_global", "backbone_hidden_size", "prompt_mid_dim", "embedding_dim", "dim_model_base"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp", "dim_ff", "dff"), INNER
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "feed_forward_size", "dense_intermediate_size"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), KV),
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "swa_head_dim", "attention_head_size", "kv_channels", "dim_head"), HEAD),
    **dict.fromkeys(
        ("attention_head_dim", "query_pre_attn_scalar", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), HEAD
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), HEAD),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "index_n_heads"), HEADS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "mamba_dt_rank"), 32),
    "time_step_rank": 8,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), HEAD),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), HEAD),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "n_group", "topk_group"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "model_max_length", "max_seq_len"), LENGTH),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), LENGTH),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model_types() -> list[str]:
    """Every model_type whose config has a causal language model, in transformers' order."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _kinds(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """Lists with an entry a layer, cut to layers of every kind that differs from the others in one of them."""
    lists = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers}
    first: dict[str, int] = {}
    for i in range(layers):
        first.setdefault(repr([v[i] for v in lists.values()]), i)
    chosen = list(first.values())[:6]
    while len(chosen) < LAYERS:
        chosen.append(chosen[-1] + 1)
    return {k: [v[i] for i in chosen] for k, v in lists.items()} | {"num_hidden_layers": len(chosen)} if lists else {}


def fields_of(default: dict[str, Any], odd: dict[str, Any]) -> dict[str, Any]:
    """The small values of the fields of a default config, nested configs included."""
    result: dict[str, Any] = {}
    for name, value in default.items():
        if name in odd:
            result[name] = fields_of(value, odd[name]) if isinstance(value, dict) and isinstance(odd[name], dict) else odd[name]
        elif isinstance(value, dict) and "model_type" in value:
            result[name] = fields_of(value, {}) | {"model_type": value["model_type"]}
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            result[name] = SIZES[name]
    layers = default.get("num_hidden_layers")
    if isinstance(layers, int) and "num_hidden_layers" not in odd:
        result |= _kinds({k: v for k, v in default.items() if k not in odd}, layers)
    return result | {k: v for k, v in odd.items() if k not in default}


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
MLA = {"num_key_value_heads": HEADS}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DOTS3 = MLA | {f"swa_{k}": HEAD for k in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")} | {
    "swa_head_dim": 2 * HEAD, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32, "head_dim": 2 * HEAD, "layer_types": ["indexed_attention", SLIDING],
    "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2, "per_layer_config": None,
}  # fmt: skip
QWEN4 = {
    "layer_types": [LINEAR, "indexed_attention"], "num_hidden_layers": 2, "indexer_n_heads": HEADS, "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD, "indexer_budget": 16, "indexer_compress_ratio": 4,
}  # fmt: skip
NO_SHARING = {"num_kv_shared_layers": 0}
ODD: dict[str, dict[str, Any]] = {  # what a family needs besides, of its own names or against SIZES
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), MLA),
    **dict.fromkeys(("kimi_linear", "minicpm3", "youtu"), MLA),
    "bailing_hybrid": MLA | {"num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_expand": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {FULL: ROPE}},
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 48},
    },
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH},
        "text_config": DOTS3,
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "fuyu": {"patch_size": 4},
    "gemma3n_text": NO_SHARING
    | {"intermediate_size": INNER}
    | {"activation_sparsity_pattern": None, "laurel_rank": 16, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL], "mamba_expand": 2},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", FULL, FULL], "num_hidden_layers": 3},
    "longcat_flash": MLA | {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD},
    "nemotron": {"num_key_value_heads": KV},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {"shape_vocab_size": 32, "pronunciation_vocab_size": 32, "shape_embed_dim": 32, "pronunciation_embed_dim": 32},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4, "attention_hidden_size": 128}
    | {"attention_head_dim": 32},
    "zamba2": {"layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"], "num_hidden_layers": 4, "n_mamba_heads": 8}
    | {"mamba_headdim": HEAD, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(model_type: str, **more: Any) -> Any:
    """The tiny config of a model_type; `more` wins over it."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**fields_of(cls().to_dict(), ODD.get(model_type, {})) | more)


def build(model_type: str, **more: Any) -> PreTrainedModel:
    """The tiny model, in fp32, its weights large enough that every layer shows in the logits: transformers' are of 0.02."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **more), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            if is_matrix(module, leaf, p):
                p.normal_(0, min(p.shape[-2:]) ** -0.5)
            elif p.dim() == 1 and (leaf == "sinks" or (leaf.endswith("bias") and "dt_" not in name)):
                p.normal_(0, 0.2)
            elif p.dim() == 1 and leaf == "weight":
                p += 0.2 * torch.randn_like(p)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.uniform_(-0.2, 0.2)
    return model


def is_matrix(module: nn.Module, leaf: str, p: torch.Tensor) -> bool:
    """Whether a parameter is multiplied with activations as a matrix, or is a stack of such: no table, no convolution."""
    table = isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d) or "Norm" in type(module).__name__
    return (
        p.dim() in (2, 3)
        and not table
        and (leaf == "weight" or isinstance(module, nn.Linear | Conv1D) or leaf.endswith("_proj"))
    )
