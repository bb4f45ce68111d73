"""Qwen 3: q and k are normed head by head; a window in the later layers, where it is switched on."""

from lowq_packers.families import Family
from lowq_packers.families._qwen import DEFAULTS, WINDOW, layer_types

FAMILY = Family(
    "qwen3",
    DEFAULTS | WINDOW | {"head_dim": 128, "attention_bias": False},
    qk_norm=True,
    windows="by layer_types",
    layer_types=layer_types,
    gguf="qwen3",
    gguf_class="Qwen3ForCausalLM",
    mlx=True,
)
