"""Decoding: from a prompt to text as it is generated. `stream` is the entry point; a decoder computes the next tokens."""

from lowq_cli.engine.prompts import stream
from lowq_cli.engine.stream import Decoder, Generation

__all__ = ["Decoder", "Generation", "stream"]
