"""Mistral: Llama with a sliding window in every layer."""

from lowq_packers.families import Family

FAMILY = Family(
    "mistral",
    {"eos_token_id": 2, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": 8}
    | {"sliding_window": 4096, "hidden_act": "silu"},
    windows="every layer",
    gguf="llama",
    mlx=True,
)
