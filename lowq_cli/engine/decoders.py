"""Which decoder takes a model: the fastest that can, with the reason why the ones before it could not."""

from typing import Any

from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.owned import owned
from lowq_cli.engine.plain import PlainDecoder
from lowq_cli.engine.plan import why_not
from lowq_cli.engine.stream import Decoder
from lowq_cli.engine.unfused import UnfusedDecoder
from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import PLAIN, check


def decoder_of(model: CausalModel, kv: str = PLAIN) -> Decoder:
    """The decoder for this model on its device, in its dtype; kept with the model, and with it its cache and its graphs.

    kv: what keys and values are held in (`decode.kv.KINDS`). Raises UsageError where it is none of them.
    """
    own = owned(model)
    kept: Any = own.decoder
    if kept is None or (kept.device, getattr(kept, "dtype", model.dtype), kept.kv) != (model.device, model.dtype, check(kv)):
        reason = why_not(model)
        if (getattr(model, "_tp_size", None) or 1) > 1:  # the processes meet in every layer, in transformers' forward
            kept = PlainDecoder(model, "its weights are spread over processes", kv)
        elif reason is None:
            kept = NativeDecoder(model, kv=kv)
        elif model.device.type == "cuda" and kv == PLAIN:
            kept = UnfusedDecoder(model, reason)
        else:
            kept = PlainDecoder(model, reason, kv)
        own.decoder = kept
    return kept
