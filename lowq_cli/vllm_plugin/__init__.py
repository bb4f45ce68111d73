"""lowq checkpoints in vLLM: found by its entry point `vllm.general_plugins`, so `vllm serve FOLDER` needs no argument.

vLLM runs `register` in each of its processes; from then on it knows the quant_method "lowq". The only place that imports vLLM
(its own models and loaders, 0.24 and 0.33, run in the tests).
"""


def register() -> None:
    """Make vLLM know lowq's quantization config. Safe to call again."""
    import lowq_cli.vllm_plugin.config  # noqa: F401  # registers on import
