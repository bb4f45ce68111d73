"""Make an answer's text from its engine's events, equal to the text of `generate`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lowq_cli.engine.detokenize import Detokenizer
from lowq_cli.engine.stopping import Stopper
from lowq_cli.serving.request import Event
from lowq_packers.errors import LowqError


@dataclass
class Answer:
    """The answer to one prompt; finish_reason has the values of `engine.stream.Generation`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""


class TextWriter:
    """Makes the text of an answer's tokens. shown: special tokens that are written, with their text."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: list[int],
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        limited_by: str,
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.answer, self.limited_by, self.stop_ids = Answer(), limited_by, stop_ids
        self.detokenizer, self.stopper = Detokenizer(tokenizer, prompt, shown), Stopper(stops)

    def take(self, event: Event) -> bool:
        """Take an event and return whether the text ends with it. Events after the end are ignored."""
        answer = self.answer
        if answer.finish_reason:
            return False
        if event.finish_reason == "error":
            raise LowqError(event.message)
        if event.token is None:
            return False
        answer.tokens.append(event.token)
        stopped = event.token in self.stop_ids
        piece = "" if stopped else self.detokenizer.push(event.token)
        if event.finish_reason:
            piece += self.detokenizer.flush()
        piece, cut = self.stopper.push(piece)
        if event.finish_reason and not cut:
            piece += self.stopper.flush()
        answer.text += piece
        if cut or event.finish_reason:
            answer.finish_reason = "stop" if cut or stopped else self.limited_by
        return bool(answer.finish_reason)
