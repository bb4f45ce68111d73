"""Bound how much a tokenizer can lengthen a text: a few replacements of "a" by eight "a" would need gigabytes."""

import base64
import json
from collections.abc import Mapping
from math import prod
from typing import Any

from lowq_packers.errors import UnsupportedError

MOST = 4096  # max. growth factor; NFKC makes at most 33 bytes of a character, other published steps double a text


def check_growth(tokens: Any, where: object) -> None:
    """Raise UnsupportedError if the normalizer or decoder of a tokenizers.Tokenizer can lengthen a text over MOST times."""
    for what in ("normalizer", "decoder"):
        part = getattr(tokens, what)
        if part is not None and (times := _times(json.loads(part.__getstate__()))) > MOST:
            raise UnsupportedError(f"{where}: its {what} may make a text {times:.3g} times as long; lowq takes up to {MOST}")


def _times(step: Mapping[str, Any]) -> float:
    """The max. number of characters that a step makes of one; for a sequence of steps, their product."""
    if steps := step.get("normalizers", step.get("decoders")):
        return prod(max(1.0, _times(s)) for s in steps)
    if step["type"] == "Replace":
        content, replaced = len(step["content"]), len(step["pattern"].get("String", ""))
        return content / replaced if replaced else content + 1.0  # a regular expression can match between any two characters
    if step["type"] == "Precompiled":  # the size of a trie, the trie, then replacements separated by zero bytes
        raw = base64.b64decode(step["precompiled_charsmap"])
        return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")), default=1)
    return len(step.get("prepend", "")) + 1.0
