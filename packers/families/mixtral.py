"""Mixtral: Mistral with a mixture of experts in every layer."""

from lowq_packers.families import Family, Mixture

FAMILY = Family(
    "mixtral",
    {"eos_token_id": 2, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": 8}
    | {"sliding_window": None, "hidden_act": "silu"},
    rope_theta=1000000.0,
    windows="every layer",
    mixture=Mixture(True, "block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size"),
    llama_shapes=False,
    gguf="llama",
    mlx=True,
)
