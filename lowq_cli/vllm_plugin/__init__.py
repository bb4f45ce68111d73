"""lowq checkpoints in vLLM: found by its entry point `vllm.general_plugins`, so `vllm serve FOLDER` needs no argument.

vLLM runs `register` in each of its processes, which makes the quant_method "lowq" known. Only this folder imports vLLM (the
tests run the models and loaders of vLLM 0.24 and 0.33).
"""


def register() -> None:
    """Register lowq's quantization config with vLLM. Repeated calls are harmless."""
    import lowq_cli.vllm_plugin.asking
    import lowq_cli.vllm_plugin.config  # noqa: F401  # both register on import
