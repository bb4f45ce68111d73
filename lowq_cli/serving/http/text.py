"""Detokenizes one answer: holds back incomplete characters, stop strings and possible beginnings of stop strings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lowq_cli.engine.detokenize import UNFINISHED, Detokenizer, shown_tokens
from lowq_cli.engine.stopping import Stopper
from lowq_cli.engine.tokenizer import Added, LoadedTokenizer
from lowq_cli.output.parts import Part, joined
from lowq_cli.output.read import Reader
from lowq_cli.serving.http.fields import shown
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.request import Event


@dataclass
class Piece:
    """The output of a step for one answer: new parts, log-probabilities if requested, and the finish reason if it ended.

    logprobs: for each token (id, log-probability, alternatives, number of characters of the answer before it), including the
        token that ended the answer if `ended`. error: the engine's message if finish_reason is "error".
    """

    parts: list[Part] = field(default_factory=list)
    logprobs: list[tuple[int, float, tuple[tuple[int, float], ...], int]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    ended: bool = False

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(p.text for p in self.parts if p.kind == "text")


class Writer:
    """Turns the events of one answer into its parts.

    Args:
        tokenizer: of the model. prompt: the prompt's ids.
        stops: strings that end the answer; they are left out of it.
        stop_ids: tokens that end the answer; they add no text.
        reader: parses thoughts and calls; None if the answer is plain text.
        special: whether special tokens are written out.
    Attributes:
        tokens: tokens of the answer so far. cached: prompt tokens found in the cache. thinking: thinking tokens.
        drafted: (accepted, rejected) draft tokens, once the answer has ended.
    """

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        prompt: tuple[int, ...],
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        reader: Reader | None = None,
        special: bool = False,
    ) -> None:
        self.reader = reader
        tags = tokenizer.added_tokens() if special else reader.tags if reader else ()
        shown = shown_tokens(tokenizer, tags) if tags else {}
        self.detokenizer, self.stopper, self.stop_ids = Detokenizer(tokenizer, list(prompt), shown), Stopper(stops), stop_ids
        self.tokens = self.cached = self.characters = self.thinking = 0
        self.drafted = (0, 0)

    @property
    def stopped(self) -> str:
        """The stop string that ended the answer, "" for none."""
        return self.stopper.met

    def push(self, events: list[Event]) -> Piece:
        """The output for these events. After finish_reason "stop" the caller cancels the request, which may still run."""
        thinks = self.reader is not None and self.reader.thinks
        piece = Piece()
        for part in [events] if not (self.stopper.stops or thinks) and events[0].logprob is None else [[e] for e in events]:
            at = self.characters
            text, cut = self._text(part)
            last = part[-1]
            piece.finish_reason, piece.error = "stop" if cut else last.finish_reason, last.message
            count = sum(e.token is not None for e in part)
            self.drafted = last.drafted if last.finish_reason else self.drafted
            self.tokens, self.cached = self.tokens + count, self.cached + sum(e.cached for e in part)
            if last.logprob is not None and last.token is not None:
                piece.logprobs.append((last.token, last.logprob, last.top, at))
            self._read(piece, text, count)
            if cut:  # events after the token that completed a stop string are dropped
                break
        piece.ended = piece.finish_reason == "stop" and last.token in self.stop_ids
        if piece.finish_reason == "stop" and self.reader is not None and self.reader.calls:
            piece.finish_reason = "tool_calls"
        return piece

    def _read(self, piece: Piece, text: str, tokens: int) -> None:
        """Add the parts of a new text to `piece`."""
        if self.reader is None:
            piece.parts += [Part("text", text)] if text else []
            return
        thinking = self.reader.thinking
        parts = self.reader.push(text, piece.finish_reason is not None, piece.finish_reason == "length")
        piece.parts = joined([*piece.parts, *parts])
        self.thinking += tokens if thinking or self.reader.thinking else 0

    def _text(self, events: list[Event]) -> tuple[str, bool]:
        """(the text that these events add, whether a stop string has ended the answer)."""
        last = events[-1].finish_reason
        ids = [e.token for e in events if e.token is not None]
        shown = ids[:-1] if last == "stop" and ids and ids[-1] in self.stop_ids else ids
        text = self.detokenizer.extend(shown)
        if last:
            text += self.detokenizer.flush()
        self.characters += len(text)
        text, cut = self.stopper.push(text)
        return text if cut or not last else text + self.stopper.flush(), cut


def places(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[int]:
    """For each token the number of characters before it; for a token inside a character, the number before that character."""
    detokenizer, offsets, n = Detokenizer(tokenizer, []), list[int](), 0
    for token in ids:
        offsets.append(n)
        n += len(detokenizer.push(token))
    return offsets


def stop_tokens(stops: Iterable[str], added: Mapping[str, Added]) -> frozenset[int]:
    """The special tokens among the stop strings. Raises Refusal for a longer string that contains one: no answer shows it."""
    special = {text: token.token for text, token in added.items() if token.special and text}
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
        """(text, bytes) of a token; the text of an incomplete character is its bytes as \\xNN; bytes are None if unknown."""
        alone = self._decoded(token)
        text = self._decoded(token, token).removeprefix(alone) or alone  # twice: some tokenizers strip a text's first space
        if UNFINISHED not in text:
            return text, list(text.encode())
        raw = self.tokenizer.token_bytes(token)
        return ("".join(f"\\x{b:02x}" for b in raw) if raw else text), raw
