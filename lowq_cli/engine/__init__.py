"""Decoding: prompt -> text as it comes. `stream` is the door; a decoder is one way to get the next token."""

from lowq_cli.engine.prompts import stream
from lowq_cli.engine.stream import Decoder, Generation

__all__ = ["Decoder", "Generation", "stream"]
