"""The definition of `--kv`: transformers' forward over a cache whose keys and values are rounded as `decode.kv` says."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lowq_kernels.decode.kv import decode, encode


def coded_cache(model: Any, kind: str) -> Any:
    """An empty one."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        window = getattr(layer, "sliding_window", None)
        cache.layers[i] = Coded(kind) if window is None else CodedWindow(kind, window)
    return cache


def logits(model: Any, kind: str, ids: torch.Tensor) -> torch.Tensor:
    """Of whole texts (B, T)."""
    return model(input_ids=ids, use_cache=True, past_key_values=coded_cache(model, kind)).logits


class OverCoded:
    """A model for `HfEagerDecoder` whose forward begins every text with such a cache."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model, self.kind, self.device, self.config = model, kind, model.device, model.config

    def forward(self, input_ids, past_key_values=None, attention_mask=None, position_ids=None, logits_to_keep=0, **_):
        """As transformers' models."""
        cache = coded_cache(self.model, self.kind) if past_key_values is None else past_key_values
        out = self.model(
            input_ids=input_ids, past_key_values=cache, attention_mask=attention_mask, position_ids=position_ids,
            logits_to_keep=logits_to_keep, use_cache=True,
        )  # fmt: skip
        return SimpleNamespace(logits=out.logits, past_key_values=cache)

    __call__ = forward


class Coded(DynamicLayer):
    """A layer's keys and values as codes in `keys` and `values`, with their scales; dequantized for a forward."""

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


class CodedWindow(DynamicSlidingWindowLayer):
    """The same values for a layer that holds a window: rounded as they come, and held in 16 bits, since a window is short."""

    def __init__(self, kind: str, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.kind = kind

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (decode(self.kind, *encode(self.kind, t)).to(t.dtype) for t in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)
