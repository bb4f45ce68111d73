"""Qwen 3's mixtures: Qwen 3 with experts in the place of most MLPs."""

from lowq_packers.families import Family, Mixture
from lowq_packers.families._qwen import DEFAULTS

FAMILY = Family(
    "qwen3_moe",
    DEFAULTS | {"num_key_value_heads": 4, "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096},
    qk_norm=True,
    windows="every layer",
    mixture=Mixture(normalises=False),
    llama_shapes=False,
    gguf="qwen3moe",
    mlx=True,
)
