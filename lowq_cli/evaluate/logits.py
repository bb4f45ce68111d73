"""Logits of whole texts, by whatever decodes a model fastest."""

from typing import Any

import torch

from lowq_cli.engine.decoders import decoder_of
from lowq_cli.engine.native_loader import NativeModel
from lowq_cli.engine.precompiling import warm_texts
from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import PLAIN


def device_of(model: CausalModel) -> torch.device:
    """Where its tensors lie."""
    return next(iter([*model.parameters(), *model.buffers()])).device


def warm_reading(model: CausalModel, tokens: int, kv: str = PLAIN) -> None:
    """Compile what `logits_of` takes for so many tokens at a time, where that is known beforehand."""
    if isinstance(model, NativeModel):
        decoder: Any = decoder_of(model, kv)  # the fused one: a model like this has no other
        warm_texts(model, decoder, tokens)


def logits_of(model: CausalModel, ids: torch.Tensor, kv: str = PLAIN) -> torch.Tensor:
    """Logits (B, T, V) at every place of whole texts (B, T), in the model's dtype; keys and values held as `kv` says."""
    ids = ids.to(device_of(model))
    if kv == PLAIN:
        return model(input_ids=ids, use_cache=False).logits
    decoder: Any = decoder_of(model, kv)  # fused or plain: the one that records graphs takes no other cache
    return decoder.logits(ids)
