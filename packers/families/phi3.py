"""Phi-3: q, k, v in one tensor, gate and up in another; heads may be rotated in part."""

from lowq_packers.families import Family

FAMILY = Family(
    "phi3",
    {"eos_token_id": 32000, "tie_word_embeddings": False, "num_key_value_heads": None, "hidden_act": "silu"}
    | {"sliding_window": None, "original_max_position_embeddings": 4096},
    qkv=("qkv_proj",),
    gate_up=("gate_up_proj",),
    qkv_bias=False,
    windows="every layer",
    partial_rope=True,
    llama_shapes=False,
)
