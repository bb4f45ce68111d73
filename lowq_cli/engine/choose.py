"""Which decoder takes a model: the fastest that can, with the reason why the ones before it could not."""

from typing import Any

from lowq_cli.engine.plain import PlainDecoder
from lowq_cli.engine.stream import Decoder


def choose(model: Any) -> Decoder:
    """The decoder for this model on its device."""
    return PlainDecoder(model)
