"""OpenAI's /v1/completions."""

from collections.abc import AsyncIterator, Iterable
from typing import Any, ClassVar

from lowq_cli.serving.http import fields
from lowq_cli.serving.http.answers import COMMENT, Answer, encoded, event
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.text import Piece

DONE = b"data: [DONE]\n\n"
LEAST = -9999.0  # lowest log-probability in a response: JSON has no -inf
Logprobs = dict[str, list[Any]]


class OpenAi:
    """What OpenAI's APIs of completions and of chats share."""

    chat: ClassVar[bool]
    media_type = "text/event-stream"

    def read(self, body: dict[str, Any]) -> fields.Params:
        """Parse a body. Raises Refusal."""
        return fields.read(body, self.chat)

    def refused(self, why: Refusal) -> dict[str, Any]:
        """As OpenAI says it."""
        return why.body

    def failed(self, why: Refusal, answer: Answer) -> bytes:
        """The last event of a stream that ends with an error."""
        return event(why.body)

    def idle(self, answer: Answer) -> bytes:
        """A comment: OpenAI's clients take every event with data for a part of the answer."""
        return COMMENT


class Completions(OpenAi):
    """The dialect of /v1/completions."""

    name, chat = "completion", False

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        texts, logprobs = list(answer.echoes), [_of_prompt(answer, i) for i in range(len(answer.writers))]
        async for index, piece in answer.pieces():
            texts[index] += piece.text
            _add(logprobs[index], _logprobs(answer, index, piece))
        choices = [
            {"index": i, "text": text, "logprobs": logprobs[i], "finish_reason": answer.finish_reasons[i]}
            for i, text in enumerate(texts)
        ]
        return {**_head(answer), "choices": choices, "usage": answer.usage()}

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        usage = {"usage": None} if answer.params.get("stream_options") else {}
        head = _head(answer)

        def chunk(index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> bytes:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
            return event({**head, "choices": [choice], **usage})

        for index, echo in enumerate(answer.echoes):
            if echo or answer.echoed[index] is not None:
                yield chunk(index, echo, _of_prompt(answer, index) if answer.echoed[index] else None)
        around = Around(lambda index, text: chunk(index, text))
        async for index, piece in answer.pieces():
            logprobs = _logprobs(answer, index, piece)
            if logprobs and piece.logprobs:
                yield chunk(index, piece.text, logprobs)
            elif piece.text:
                yield around(index, piece.text)
            if piece.finish_reason:
                yield chunk(index, "", None, piece.finish_reason)
        if usage:
            yield event({**head, "choices": [], "usage": answer.usage()})
        yield DONE


class Around:
    """Makes chunks that differ only in their text; the JSON around the text is encoded once per choice."""

    HERE = "51d0b9a2f8c64b0f9a0f"  # placeholder of the text

    def __init__(self, make: Any) -> None:
        self.make = make
        self.templates: dict[int, list[bytes]] = {}

    def __call__(self, index: int, text: str) -> bytes:
        if index not in self.templates:
            self.templates[index] = self.make(index, self.HERE).split(encoded(self.HERE))
        before, after = self.templates[index]
        return before + encoded(text) + after


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": answer.created, "model": answer.model}


def _none(answer: Answer) -> Logprobs | None:
    if answer.params.logprobs is None:
        return None
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _of_prompt(answer: Answer, index: int) -> Logprobs | None:
    """The log-probabilities of an echoed prompt; its first token has none."""
    table, echoed = _none(answer), answer.echoed[index]
    if table is None or echoed is None:
        return table
    for i, token in enumerate(echoed.tokens):
        text = answer.names.of(token)[0]
        logprob, top = echoed.likelihoods[i - 1] if i else (None, ())
        likeliest = None if logprob is None else _likeliest(answer, text, logprob, top)
        shown = None if logprob is None else max(logprob, LEAST)
        row = {"tokens": text, "token_logprobs": shown, "top_logprobs": likeliest, "text_offset": echoed.places[i]}
        _add(table, {name: [v] for name, v in row.items()})
    return table


def _logprobs(answer: Answer, index: int, piece: Piece) -> Logprobs | None:
    """A piece's log-probabilities, including that of the stop token, so that max_tokens 1 always returns one."""
    table = _none(answer)
    for token, logprob, top, at in piece.logprobs if table is not None else ():
        text = answer.names.of(token)[0]
        likeliest = _likeliest(answer, text, logprob, top)
        row = {"tokens": text, "token_logprobs": max(logprob, LEAST), "top_logprobs": likeliest}
        _add(table, {name: [v] for name, v in row.items()} | {"text_offset": [len(answer.echoes[index]) + at]})
    return table


def _likeliest(answer: Answer, text: str, logprob: float, top: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Text -> log-probability of a token and its alternatives; the highest value if alternatives have the same text."""
    by_text = {text: max(logprob, LEAST)}
    for token, value in top:
        name = answer.names.of(token)[0]
        by_text[name] = max(value, by_text.get(name, LEAST))
    return by_text


def _add(all_: Logprobs | None, more: Logprobs | None) -> None:
    for name, rows in (more or {}).items():
        if all_ is not None:
            all_[name] += rows
