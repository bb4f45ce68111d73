"""Qwen 2 and 2.5: biases of q, k and v; a window in the later layers, where it is switched on."""

from lowq_packers.families import Family
from lowq_packers.families._qwen import DEFAULTS, WINDOW, layer_types

FAMILY = Family(
    "qwen2",
    DEFAULTS | WINDOW,
    qkv_bias=True,
    windows="by layer_types",
    layer_types=layer_types,
    gguf="qwen2",
    gguf_class="Qwen2ForCausalLM",
    mlx=True,
)
