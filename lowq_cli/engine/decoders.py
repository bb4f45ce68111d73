"""Which decoder takes a model: the fastest that can, with the reason why the ones before it could not."""

from typing import Any

from lowq_cli.engine.hf_eager import HfEagerDecoder
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.plan import why_not
from lowq_cli.engine.stream import Decoder
from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import PLAIN, check
from lowq_packers.errors import UnsupportedError


def decoder_of(model: CausalModel, kv: str = PLAIN) -> Decoder:
    """The decoder for this model on its device, in its dtype; kept with the model, and with it its cache and its graphs.

    kv: what keys and values are held in (`decode.kv.KINDS`). Raises UsageError where it is none of them, UnsupportedError where
    the model has no native decoder and so holds them in 16 bits.
    """
    own = owned(model)
    kept: Any = own.decoder
    if kept is None or (kept.device, getattr(kept, "dtype", model.dtype), kept.kv) != (model.device, model.dtype, check(kv)):
        if (getattr(model, "_tp_size", None) or 1) > 1:  # the processes meet in every layer, in transformers' forward
            reason: str | None = "its weights are spread over processes"
        else:
            reason = why_not(model)
        if reason and kv != PLAIN:
            raise UnsupportedError(f"this model goes by transformers' forward, whose cache is in 16 bits; leave --kv {kv} out")
        kept = HfEagerDecoder(model, reason) if reason else NativeDecoder(model, kv=kv)
        own.decoder = kept
    return kept
