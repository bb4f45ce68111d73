"""Ask the quantization config "lowq" for every embedding, head and linear layer, also where vLLM's class does not pass it.

Half of vLLM's models (Gemma, Cohere, Granite with experts, Mixtral) make their token embedding without a quant_config, some
(Mamba 2, Falcon-H1) their head, and Mamba its linear layers. They would expect dense tensors of all these.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from lowq_cli.vllm_plugin.config import LowqVllmConfig


def asking(init: Callable[..., None]) -> Callable[..., None]:
    """`init` of a layer, with the checkpoint's quant_config where none is passed and the checkpoint is lowq's."""
    arguments = signature(init)

    @wraps(init)
    def made(*args: Any, **kwargs: Any) -> None:
        given = arguments.bind(*args, **kwargs)
        if given.arguments.get("quant_config") is None:
            config = getattr(get_current_vllm_config_or_none(), "quant_config", None)
            if isinstance(config, LowqVllmConfig):
                given.arguments["quant_config"] = config
        init(*given.args, **given.kwargs)

    return made


VocabParallelEmbedding.__init__ = asking(VocabParallelEmbedding.__init__)  # type: ignore[method-assign]  # heads call it too
LinearBase.__init__ = asking(LinearBase.__init__)  # type: ignore[method-assign]
