"""How much longer than a text a tokenizer may make it: a few replacements of "a" by eight of it ask for gigabytes."""

import base64
import json
from collections.abc import Mapping
from math import prod
from typing import Any

from lowq_packers.errors import UnsupportedError

MOST = 4096  # times as long; the longest that NFKC makes of a character are 33 bytes, and what else is published doubles


def check_growth(tokens: Any, where: object) -> None:
    """Raise UnsupportedError where the normalizer or the decoder of a tokenizers.Tokenizer may make a text longer than MOST."""
    for what in ("normalizer", "decoder"):
        part = getattr(tokens, what)
        if part is not None and (times := _times(json.loads(part.__getstate__()))) > MOST:
            raise UnsupportedError(f"{where}: its {what} may make a text {times:.3g} times as long; lowq takes up to {MOST}")


def _times(step: Mapping[str, Any]) -> float:
    """What one character may become: of a sequence, what its steps do to each other's."""
    if steps := step.get("normalizers", step.get("decoders")):
        return prod(max(1.0, _times(s)) for s in steps)
    if step["type"] == "Replace":
        content, replaced = len(step["content"]), len(step["pattern"].get("String", ""))
        return content / replaced if replaced else content + 1.0  # a regular expression may match between two characters
    if step["type"] == "Precompiled":  # a trie after its size in bytes, and texts with zeros between
        raw = base64.b64decode(step["precompiled_charsmap"])
        return max(map(len, raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")), default=1)
    return len(step.get("prepend", "")) + 1.0
