"""Streaming detokenisation: from token ids to pieces of text, without splitting a character.

A token may have only part of a character's bytes, and tokenizers treat the first token of a text specially (SentencePiece drops
its leading space). So each step decodes a short window of tokens, and the piece is the text that the previous window did not
have; while the window ends in an unfinished character, the piece is empty. Now and then the window moves on, and is decoded
without the new tokens as well.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from lowq_cli.models import Tokenizer

UNFINISHED = "\ufffd"  # the tokenizer's replacement for bytes that are not (yet) a character
CONTEXT = 6  # tokens of the prompt at the start of the first window
WINDOW = 4  # max. tokens in the window whose text is already shown
MOST_HELD = 16  # max. tokens held back: a character has at most 4 bytes, so at most 4 tokens; more means invalid UTF-8


class Detokenizer:
    """Detokenises one sequence. `push` takes a token and returns the text that is now certain; `flush` returns the rest.

    shown: id -> text of special tokens that are shown nevertheless (`shown_tokens`).
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], shown: Mapping[int, str] = MappingProxyType({})) -> None:
        self.tokenizer, self.texts = tokenizer, shown
        self.ids = prompt[-CONTEXT:]
        self.start, self.shown = 0, len(self.ids)  # indices: first token of the window, first token not shown yet
        self.before: str | None = None  # the text of the tokens between these two, once decoded

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, token: int) -> str:
        """Append a token; returns the text that it completes, "" while a character is unfinished."""
        return self.extend([token])

    def extend(self, tokens: list[int]) -> str:
        """Append tokens; returns the joined results of `push` for each, with only two calls of the tokenizer."""
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
        """The text that was held back, as the tokenizer decodes it."""
        return self._take(final=True) if self.shown < len(self.ids) else ""

    def _take(self, final: bool) -> str:
        end, now = len(self.ids), self._decode(self.ids[self.start :])
        whole = now
        while now.endswith(UNFINISHED) and not final:  # the last character is unfinished: leave out its tokens
            end -= 1
            if len(self.ids) - end >= MOST_HELD:
                end, now = len(self.ids), whole
                break
            if end <= self.shown:
                return ""
            now = self._decode(self.ids[self.start : end])
        before = self._decode(self.ids[self.start : self.shown]) if self.before is None else self.before
        if len(now) <= len(before):  # a special token, or one with empty text
            return ""
        self.before = now
        if end - self.start > WINDOW:
            self.start, self.before = self.shown, None
        self.shown = end
        return now[len(before) :]


def shown_tokens(tokenizer: Tokenizer, tags: Iterable[str]) -> dict[int, str]:
    """id -> text of the special tokens among these tags, which the parser of the output needs."""
    added: dict[str, Any] = getattr(tokenizer, "added_tokens", dict)()
    wanted_tags = list(tags)
    return {token.token: text for text, token in added.items() if token.special and any(text in tag for tag in wanted_tags)}
