"""The answer to one HTTP request, and the protocol of the dialects that write it."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

from lowq_cli.serving.http.dispatcher import Live
from lowq_cli.serving.http.fields import Params
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.text import Names, Piece, Writer
from lowq_cli.serving.request import Likelihood

UNANSWERED = {"error": (500, "server_error"), "refused": (400, "invalid_request_error"), "cancelled": (503, "server_error")}
JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # json.dumps would make one for every token


def encoded(value: object) -> bytes:
    """JSON as bytes. Half a surrogate pair becomes a question mark, a number that is not finite null: both may come from the
    client or the model, and JSON cannot represent them."""
    try:
        text = JSON.encode(value)
    except ValueError:
        text = JSON.encode(json.loads(json.dumps(value), parse_constant=lambda word: None))
    return text.encode("utf-8", "replace")


class Gone(Exception):  # not an error: there is no client to report it to
    """The client has left."""


class Echoed(NamedTuple):
    """A prompt's tokens, the number of characters before each, and the likelihoods of all but the first."""

    tokens: Sequence[int]
    places: Sequence[int]
    likelihoods: Sequence[Likelihood]


class Answer:
    """The answer to one HTTP request: its choices, made from the events of its engine requests.

    Args:
        params: the parsed body.
        live: the engine requests, one per choice, in order.
        writers: one per choice.
        prompt_tokens: the number of tokens of all prompts together.
        names: texts of single tokens. model: the model's name.
        echoes: the echoed prompt at the start of each choice's text, or "". echoed: its tokens' likelihoods.
    Attributes:
        id, created: as the response shows them. finish_reasons: one per choice, "" while it goes on.
        events: the number of events sent, in dialects that number them.
    """

    def __init__(
        self,
        params: Params,
        live: Live,
        writers: list[Writer],
        prompt_tokens: int,
        names: Names,
        model: str,
        echoes: list[str],
        echoed: "Sequence[Echoed | None]" = (),
    ) -> None:
        self.params, self.live, self.writers, self.names, self.echoes = params, live, writers, names, echoes
        self.echoed = echoed or [None] * len(writers)
        self.prompt_tokens, self.model = prompt_tokens, model
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.finish_reasons = [""] * len(writers)
        self.events = 0

    def usage(self) -> dict[str, Any]:
        """The token counts so far in OpenAI's `usage` format."""
        new_tokens, cached = sum(w.tokens for w in self.writers), sum(w.cached for w in self.writers)
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": self.prompt_tokens + new_tokens,
        }
        right, wrong = (sum(w.drafted[i] for w in self.writers) for i in (0, 1))
        drafted = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong} if right or wrong else {}
        return {
            **counts,
            "prompt_tokens_details": {"cached_tokens": min(cached, self.prompt_tokens)},
            "completion_tokens_details": {"reasoning_tokens": sum(w.thinking for w in self.writers), **drafted},
        }

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (choice, piece) until all choices have ended. Raises Refusal if an answer could not be computed, Gone."""
        left = set(range(len(self.writers)))
        if self.params.max_tokens == 0:  # only the prompt was requested (echo)
            self.finish_reasons = ["length" for _ in left]
            for index in left:
                yield index, Piece(finish_reason="length")
            return
        while left:
            came = await self.live.take()
            if not came:
                raise Gone
            for index, events in came.items():
                if index not in left:
                    continue
                piece = self.writers[index].push(events)
                unanswered(piece.finish_reason, piece.error)
                if piece.finish_reason:
                    self.finish_reasons[index] = piece.finish_reason
                    self.live.cancel(index)
                    left.discard(index)
                yield index, piece


def unanswered(finish_reason: str | None, message: str) -> None:
    """Raise a Refusal if the engine ended a request without an answer."""
    if finish_reason in UNANSWERED:
        status, kind = UNANSWERED[finish_reason]
        raise Refusal(status, message or "the server is stopping", kind)


class Dialect(Protocol):
    """An API that clients speak. name: names its requests in the log. media_type: of its streams."""

    name: str
    media_type: str

    def read(self, body: dict[str, Any]) -> Params:
        """Parse a body. Raises Refusal."""
        ...

    def refused(self, why: Refusal) -> dict[str, Any]:
        """The body of an error response."""
        ...

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object. Raises what `Answer.pieces` does."""
        ...

    def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the answer as a stream. Raises what `Answer.pieces` does."""
        ...

    def failed(self, why: Refusal, answer: "Answer") -> bytes:
        """The last event of a stream that ends with an error."""
        ...

    def idle(self, answer: "Answer") -> bytes:
        """An event without content, for a stream that has been silent for a while."""
        ...


COMMENT = b": waiting\n\n"  # a server-sent event without fields, which clients skip


def event(value: object, name: str = "") -> bytes:
    """A server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encoded(value) + b"\n\n"
