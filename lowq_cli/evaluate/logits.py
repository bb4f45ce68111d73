"""Logits of whole texts, by the model's fastest decoder."""

from typing import Any

import torch

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.native_loader import NativeModel
from lowq_cli.engine.precompiling import warm_texts
from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import PLAIN


def device_of(model: CausalModel) -> torch.device:
    """The device of the model's tensors."""
    return next(iter([*model.parameters(), *model.buffers()])).device


def warm_reading(model: CausalModel, tokens: int, kv: str = PLAIN) -> None:
    """Compile the kernels of `logits_of` for `tokens` tokens per call, if the model's kernels are known beforehand."""
    if isinstance(model, NativeModel):
        decoder: Any = decoder_of(model, kv)  # always the fused one for a NativeModel
        warm_texts(model, decoder, tokens)


def logits_of(model: CausalModel, ids: torch.Tensor, kv: str = PLAIN) -> torch.Tensor:
    """Logits (B, T, V) at every position of texts (B, T), in the model's dtype, with a KV cache of kind `kv`."""
    ids = ids.to(device_of(model))
    if kv == PLAIN:
        return model(input_ids=ids, use_cache=False).logits
    decoder: Any = decoder_of(model, kv)  # fused or plain; the decoder with CUDA graphs only has plain caches
    return decoder.logits(ids)
