"""The text of one answer, from its tokens: never half a character, never a stop string or what may become one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from lowq_cli.engine.detokenize import UNFINISHED, Detokenizer
from lowq_cli.engine.stopping import Stopper
from lowq_cli.engine.tokenizer import Added, LoadedTokenizer
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.http.tools import CLOSE, OPEN, Reader, Tools
from lowq_cli.serving.request import Event


@dataclass
class Piece:
    """What a step adds to an answer: text, the tokens' log-probabilities if asked for, and how it ended, if it did.

    logprobs: of each token (id, log-probability, alternatives, characters of the answer before it). calls: of
        tools, as OpenAI's deltas have them. error: the engine's line, with finish_reason "error".
    """

    text: str = ""
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...], int]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Writer:
    """Events of one answer in, pieces of text out.

    Args:
        tokenizer, prompt: the model's, and the ids that the answer goes on from.
        stops: texts that end it; they are no part of it.
        stop_ids: tokens that end it; they have no text.
        tools: what it may call, read out of its text.
        added: the tokenizer's added tokens. Special ones that are tags of calls have a text for the reader of calls.
    """

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        prompt: tuple[int, ...],
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        tools: Tools | None = None,
        added: Mapping[str, Added] = MappingProxyType({}),
    ) -> None:
        self.reader = Reader(tools) if tools and tools.given else None
        tags = (OPEN, CLOSE) if self.reader else ()
        self.tags = {added[tag].token: tag for tag in tags if tag in added and added[tag].special}
        self.detokenizer, self.stopper, self.stop_ids = Detokenizer(tokenizer, list(prompt)), Stopper(stops), stop_ids
        self.tokens = self.cached = self.characters = 0

    def push(self, events: list[Event]) -> Piece:
        """What these events add. With finish_reason "stop" nothing more is wanted, whether the engine has ended or not."""
        at_once = not self.stopper.stops and events[0].logprob is None
        text, cut, taken, places = "", False, list[Event](), list[int]()
        for part in [events] if at_once else [[e] for e in events]:
            places.append(self.characters)
            more, cut = self._text(part)
            text, taken = text + more, taken + part
            if cut:  # what came along with the token that completed a stop is no part of the answer
                break
        self.cached += sum(e.cached for e in taken)
        self.tokens += sum(e.token is not None for e in taken)
        piece = Piece(text, finish_reason="stop" if cut else taken[-1].finish_reason, error=taken[-1].message)
        if not at_once:
            named = zip(taken, places, strict=True)
            piece.logprobs = [
                (e.token, e.logprob, e.top, at) for e, at in named if e.token is not None and e.logprob is not None
            ]
        if self.reader is not None:
            cut_off = piece.finish_reason == "length"
            piece.text, piece.calls = self.reader.push(text, piece.finish_reason is not None, cut_off)
            if piece.finish_reason == "stop" and self.reader.calls:
                piece.finish_reason = "tool_calls"
        return piece

    def _text(self, events: list[Event]) -> tuple[str, bool]:
        """What these events add to the text, and whether a stop has ended it."""
        last = events[-1].finish_reason
        ids = [e.token for e in events if e.token is not None]
        shown = ids[:-1] if last == "stop" and ids and ids[-1] in self.stop_ids else ids
        text = self._decoded(shown)
        if last:
            text += self.detokenizer.flush()
        self.characters += len(text)
        text, cut = self.stopper.push(text)
        return text if cut or not last else text + self.stopper.flush(), cut

    def _decoded(self, ids: list[int]) -> str:
        """What tokens add to the text, tags that decoding leaves out among it."""
        text, begun = "", 0
        for i, token in enumerate(ids if self.tags else ()):
            if token in self.tags:
                text += self.detokenizer.extend(ids[begun:i]) + self.detokenizer.flush() + self.tags[token]
                begun = i
        return text + (self.detokenizer.extend(ids[begun:]) if ids[begun:] else "")


def stop_tokens(stops: Iterable[str], added: Mapping[str, Added]) -> frozenset[int]:
    """The special tokens among the texts to stop at. Raises Refusal for one that holds more: no answer ever shows it."""
    special = {text: found.token for text, found in added.items() if found.special and text}
    for stop in stops:
        if stop not in special and (inner := next((text for text in special if text in stop), None)):
            raise wrong("stop", f"{shown(stop)} holds {shown(inner)}, a token that answers do not show; name that one alone")
    return frozenset(special[stop] for stop in stops if stop in special)


class Names:
    """The text and bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self.tokenizer = tokenizer
        self.of = lru_cache(1 << 16)(self._of)

    def _decoded(self, *ids: int) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        """(text, bytes) of a token; where it is no whole character, its bytes written out; None where they are not known."""
        alone = self._decoded(token)
        text = self._decoded(token, token).removeprefix(alone) or alone  # the first of a text loses its leading space in some
        if UNFINISHED not in text:
            return text, list(text.encode())
        raw = self.tokenizer.token_bytes(token)
        return ("".join(f"\\x{b:02x}" for b in raw) if raw else text), raw
