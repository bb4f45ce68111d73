"""The text of one answer, from its tokens: never half a character, never a stop string or what may become one."""

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
    """What a step adds to an answer: its parts, the tokens' log-probabilities if asked for, and how it ended, if it did.

    logprobs: of each token (id, log-probability, alternatives, characters of the answer before it), the token that ended the
        answer among them if `ended`. error: the engine's line, with finish_reason "error".
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
    """Events of one answer in, its parts out.

    Args:
        tokenizer, prompt: the model's, and the ids that the answer goes on from.
        stops: texts that end it; they are no part of it.
        stop_ids: tokens that end it; they have no text.
        reader: of thoughts and calls; None where the answer is text and nothing else.
        special: whether special tokens have a text, too.
    Attributes:
        tokens, cached: of the answer so far, and of its prompt those that were in the cache. thinking: tokens of thoughts.
        drafted: of its drafts, those that were right and wrong, once it has ended.
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
        """The text to stop at that ended the answer, "" for none."""
        return self.stopper.met

    def push(self, events: list[Event]) -> Piece:
        """What these events add. With finish_reason "stop" nothing more is wanted, whether the engine has ended or not."""
        thinks = self.reader is not None and self.reader.thinks
        piece = Piece()
        for part in [events] if not (self.stopper.stops or thinks) and events[0].logprob is None else [[e] for e in events]:
            at = self.characters
            text, cut = self._text(part)
            last = part[-1]
            piece.finish_reason, piece.error = "stop" if cut else last.finish_reason, last.message
            made = sum(e.token is not None for e in part)
            self.drafted = last.drafted if last.finish_reason else self.drafted
            self.tokens, self.cached = self.tokens + made, self.cached + sum(e.cached for e in part)
            if last.logprob is not None and last.token is not None:
                piece.logprobs.append((last.token, last.logprob, last.top, at))
            self._read(piece, text, made)
            if cut:  # what came along with the token that completed a stop is no part of the answer
                break
        piece.ended = piece.finish_reason == "stop" and last.token in self.stop_ids
        if piece.finish_reason == "stop" and self.reader is not None and self.reader.calls:
            piece.finish_reason = "tool_calls"
        return piece

    def _read(self, piece: Piece, text: str, tokens: int) -> None:
        """What a text adds to the parts."""
        if self.reader is None:
            piece.parts += [Part("text", text)] if text else []
            return
        thinking = self.reader.thinking
        parts = self.reader.push(text, piece.finish_reason is not None, piece.finish_reason == "length")
        piece.parts = joined([*piece.parts, *parts])
        self.thinking += tokens if thinking or self.reader.thinking else 0

    def _text(self, events: list[Event]) -> tuple[str, bool]:
        """What these events add to the text, and whether a stop has ended it."""
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
    """The characters of a text before each of its tokens; before a part of a character, those before the character."""
    detokenizer, found, n = Detokenizer(tokenizer, []), list[int](), 0
    for token in ids:
        found.append(n)
        n += len(detokenizer.push(token))
    return found


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
