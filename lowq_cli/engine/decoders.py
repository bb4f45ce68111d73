"""Choose the decoder of a model: the fastest that can run it, with the reason why faster ones cannot."""

from typing import Any

import torch

from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.model_record import LOCK, note, up_to_date
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.plan import why_not
from lowq_cli.engine.stream import Decoder
from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import PLAIN, check
from lowq_packers.errors import UnsupportedError


def decoder_of(model: CausalModel, kv: str = PLAIN, free: bool = False) -> Decoder:
    """The decoder for a model on its device, in its dtype; kept with the model, together with its cache and graphs, until the
    model is changed.

    kv: the format of cached keys and values (`decode.kv.KINDS`). free: another decoder if a generation is using that one.
    Raises UsageError for an unknown format, and UnsupportedError for one other than 16 bits if the model has no native decoder.
    """
    with LOCK, torch.inference_mode(False):  # the caller's mode must not become that of joined weights
        return _decoder_of(model, kv, free)


def _decoder_of(model: CausalModel, kv: str, free: bool) -> Decoder:
    record = up_to_date(model)
    if free and (user := getattr(record.decoder, "user", None)) and (generation := user()) and not generation.done:
        if hasattr(model, "plan"):
            record.decoder, record.drafters = None, {}
        else:
            record.forget()
    decoder: Any = record.decoder
    if decoder is None or (decoder.device, getattr(decoder, "dtype", model.dtype), decoder.kv) != (
        model.device,
        model.dtype,
        check(kv),
    ):
        if (getattr(model, "_tp_size", None) or 1) > 1:  # processes synchronise in every layer, inside transformers' forward
            reason: str | None = "its weights are spread over processes"
        else:
            reason = why_not(model)
        if reason and kv != PLAIN:
            raise UnsupportedError(f"this model runs in transformers' forward, whose cache has 16 bits; leave --kv {kv} out")
        decoder = HfEagerDecoder(model, reason) if reason else NativeDecoder(model, kv=kv)
        record.decoder = decoder
        note(model)
    return decoder
