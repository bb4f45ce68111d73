"""Groups the parts of an answer into blocks of one kind, for /v1/messages, /v1/responses and ollama's API."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lowq_cli.output.json_text import as_object
from lowq_cli.serving.dialects.completions import LEAST
from lowq_cli.serving.http.answers import Answer
from lowq_cli.serving.http.text import Piece


@dataclass
class Block:
    """One block. number: its index in the answer. name, id: of a call. text: thoughts, text, or JSON of a call's arguments.
    logprobs: of a text's tokens, as `logprobs_of`; the first `taken` were returned by `new_logprobs`."""

    kind: Literal["thought", "text", "call"]
    number: int
    name: str = ""
    id: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    taken: int = 0

    def new_logprobs(self) -> list[dict[str, Any]]:
        """The log-probabilities since the last call."""
        begin, self.taken = self.taken, len(self.logprobs)
        return self.logprobs[begin:]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object; {} if their JSON is incomplete or not an object."""
        return as_object(self.text)


def logprobs_of(answer: Answer, piece: Piece) -> list[dict[str, Any]]:
    """A piece's log-probabilities, without the token that ended the answer, as in OpenAI's API; none if not requested."""
    if answer.params.logprobs is None:
        return []
    rows = piece.logprobs[:-1] if piece.ended else piece.logprobs
    return [_named(answer, token, p) | {"top_logprobs": [_named(answer, *t) for t in top]} for token, p, top, _ in rows]


def _named(answer: Answer, token: int, logprob: float) -> dict[str, Any]:
    text, raw = answer.names.of(token)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": raw}


Change = tuple[Block, Literal["begun", "more", "ended"], str]


async def blocks(answer: Answer) -> AsyncIterator[Change]:
    """Yield each block when it begins, for each new text, and when it ends. Raises what `Answer.pieces` does."""
    now: Block | None = None
    number = 0
    waiting = list[dict[str, Any]]()  # of tokens whose text is not complete yet
    async for _, piece in answer.pieces():
        waiting += logprobs_of(answer, piece)
        for part in piece.parts:
            kind: Any = "call" if part.kind == "arguments" else part.kind
            if now is None or part.kind == "call" or now.kind != kind:
                if now is not None:
                    yield now, "ended", ""
                now = Block(kind, number, part.text if kind == "call" else "", part.id)
                number += 1
                yield now, "begun", ""
            if part.kind != "call":
                now.text += part.text
                if kind == "text":
                    now.logprobs, waiting = now.logprobs + waiting, []
                yield now, "more", part.text
    if now is not None:
        yield now, "ended", ""


async def whole_blocks(answer: Answer) -> list[Block]:
    """All blocks, once the answer has ended."""
    return [block async for block, change, _ in blocks(answer) if change == "ended"]
