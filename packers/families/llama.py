"""Llama: what the other families differ from."""

from lowq_packers.families import Family

FAMILY = Family(
    "llama",
    {"eos_token_id": 2, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": None}
    | {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    gguf="llama",
    gguf_class="LlamaForCausalLM",
    mlx=True,
)
