"""Text as it comes: token ids in, pieces of text out, never half a character.

A token may hold part of a character's bytes, and decoders treat the first token of a text specially (SentencePiece drops
its leading space). So each step decodes a short window, and what it has more than the one before is the piece; while the window
ends in an unfinished character nothing comes out. Now and then it moves on, and is decoded without the new tokens too.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from lowq_cli.models import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder puts where bytes do not (yet) make a character
CONTEXT = 6  # tokens of the prompt that the window starts with
WINDOW = 4  # shown tokens that it may hold
MOST_HELD = 16  # a character is at most 4 bytes, so at most 4 tokens; more than this and the bytes are simply not UTF-8


class Detokenizer:
    """Pieces of one sequence. `push` takes a token and returns the text that is now certain; `flush` the rest.

    shown: special tokens that have a text all the same, with that (`shown_tokens`).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], shown: Mapping[int, str] = MappingProxyType({})) -> None:
        self.tokenizer, self.texts = tokenizer, shown
        self.ids = prompt[-CONTEXT:]
        self.start, self.shown = 0, len(self.ids)  # the window's first token, and the first token not yet in the text
        self.before: str | None = None  # the text of those between, once it is known

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        return self.extend([token])

    def extend(self, tokens: list[int]) -> str:
        """The text that these tokens complete: what `push` of each would give together, for two decodings in all."""
        text, begun = "", 0
        for i, token in enumerate(tokens if self.texts else ()):
            if token in self.texts:
                text += self._extend(tokens[begun:i]) + self.flush() + self.texts[token]
                begun = i
        return text + self._extend(tokens[begun:])

    def _extend(self, tokens: list[int]) -> str:
        self.ids += tokens
        return self._take(final=False) if tokens else ""

    def flush(self) -> str:
        """What was held back, as the decoder renders it."""
        return self._take(final=True) if self.shown < len(self.ids) else ""

    def _take(self, final: bool) -> str:
        end, now = len(self.ids), self._decode(self.ids[self.start :])
        whole = now
        while now.endswith(UNFINISHED) and not final:  # a character goes on in the next token: up to the one before it
            end -= 1
            if len(self.ids) - end >= MOST_HELD:
                end, now = len(self.ids), whole
                break
            if end <= self.shown:
                return ""
            now = self._decode(self.ids[self.start : end])
        before = self._decode(self.ids[self.start : self.shown]) if self.before is None else self.before
        if len(now) <= len(before):  # a special token, or an empty one
            return ""
        self.before = now
        if end - self.start > WINDOW:
            self.start, self.before = self.shown, None
        self.shown = end
        return now[len(before) :]


def shown_tokens(tokenizer: Tokenizer, tags: Iterable[str]) -> dict[int, str]:
    """The special tokens that a reader of these tags has to see, and their texts."""
    added: dict[str, Any] = getattr(tokenizer, "added_tokens", dict)()
    wanted = list(tags)
    return {found.token: text for text, found in added.items() if found.special and any(text in tag for tag in wanted)}
