"""transformers' static cache, for decoders that record a model's own forward as a CUDA graph."""

from typing import Any

import torch
from transformers import StaticCache


def static_cache(model: Any, slots: int) -> Any:
    """A cache of `slots` tokens, allocated by the first forward."""
    return StaticCache(config=model.config, max_cache_len=slots)


def state_of(cache: Any) -> list[torch.Tensor]:
    """Every tensor a step changes: keys, values and the counters beside them."""
    return [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
