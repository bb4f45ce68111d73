"""The text of one answer, from its tokens: never half a character, never a stop string or what may become one."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lowq_cli.engine.detokenize import UNFINISHED, Detokenizer
from lowq_cli.engine.stopping import Stopper
from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.serving.http.tools import Reader, Tools
from lowq_cli.serving.request import Event


@dataclass
class Piece:
    """What a step adds to an answer: text, the tokens' log-probabilities if asked for, and how it ended, if it did.

    logprobs: (token id, log-probability, alternatives) of each token. error: the engine's line, with finish_reason "error".
    calls: of tools, as OpenAI's deltas have them.
    """

    text: str = ""
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
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
    """

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        prompt: tuple[int, ...],
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        tools: Tools | None = None,
    ) -> None:
        self.reader = Reader(tools) if tools and tools.given else None
        self.detokenizer, self.stopper, self.stop_ids = Detokenizer(tokenizer, list(prompt)), Stopper(stops), stop_ids
        self.tokens = self.cached = 0

    def push(self, events: list[Event]) -> Piece:
        """What these events add. With finish_reason "stop" nothing more is wanted, whether the engine has ended or not."""
        if len(events) == 1 or not self.stopper.stops:
            (text, cut), taken = self._text(events), events
        else:  # a token at a time: what came along with the one that completed a stop is no part of the answer
            text, cut, taken = "", False, []
            for event in events:
                more, cut = self._text([event])
                text, taken = text + more, [*taken, event]
                if cut:
                    break
        self.cached += sum(e.cached for e in taken)
        self.tokens += sum(e.token is not None for e in taken)
        piece = Piece(text, finish_reason="stop" if cut else taken[-1].finish_reason, error=taken[-1].message)
        piece.logprobs = [(e.token, e.logprob, e.top) for e in taken if e.token is not None and e.logprob is not None]
        if self.reader is not None:
            piece.text, piece.calls = self.reader.push(text, piece.finish_reason is not None)
            if piece.finish_reason == "stop" and self.reader.calls:
                piece.finish_reason = "tool_calls"
        return piece

    def _text(self, events: list[Event]) -> tuple[str, bool]:
        """What these events add to the text, and whether a stop has ended it."""
        last = events[-1].finish_reason
        ids = [e.token for e in events if e.token is not None]
        shown = ids[:-1] if last == "stop" and ids and ids[-1] in self.stop_ids else ids
        text = self.detokenizer.extend(shown) if shown else ""
        if last:
            text += self.detokenizer.flush()
        text, cut = self.stopper.push(text)
        return text if cut or not last else text + self.stopper.flush(), cut


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
