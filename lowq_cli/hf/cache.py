"""transformers' caches: static for decoders that record a model's own forward, and in few bits."""

from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import decode, encode
from lowq_packers.errors import UnsupportedError


def static_cache(model: CausalModel, slots: int) -> Any:
    """A cache of `slots` tokens, allocated by the first forward."""
    return StaticCache(config=model.config, max_cache_len=slots)


def state_of(cache: Any) -> list[torch.Tensor]:
    """Every tensor a step changes: keys, values and the counters beside them."""
    return [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]


def coded_cache(model: CausalModel, kind: str) -> Any:
    """An empty cache whose keys and values are held as `decode.kv` says. Raises UnsupportedError for a model without any."""
    cache = DynamicCache(config=model.config)
    plain = [type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers]
    if not any(plain):
        raise UnsupportedError(f"{model.config.model_type} has no cache of keys and values; leave --kv {kind} out")
    for i, layer in enumerate(cache.layers):
        if plain[i]:
            window = getattr(layer, "sliding_window", None)
            cache.layers[i] = _Coded(kind) if window is None else _CodedWindow(kind, window)
    return cache


class _Coded(DynamicLayer):
    """A layer's keys and values as codes in `keys` and `values`, with the scales beside them; expanded for a forward."""

    key_scales: torch.Tensor
    value_scales: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        new = [t for states in (key_states, value_states) for t in encode(self.kind, states)]
        if self.is_initialized:
            held: Any = (self.keys, self.key_scales, self.values, self.value_scales)
            new = [torch.cat(both, 2) for both in zip(held, new, strict=True)]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.key_scales, self.values, self.value_scales = new
        return tuple(decode(self.kind, *both).to(self.dtype) for both in (new[:2], new[2:]))


class _CodedWindow(DynamicSlidingWindowLayer):
    """The same values for a layer that holds a window: rounded as they come, and held in 16 bits, since a window is short."""

    def __init__(self, kind: str, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.kind = kind

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (decode(self.kind, *encode(self.kind, t)).to(t.dtype) for t in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)
