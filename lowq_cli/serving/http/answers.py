"""What goes back to the client: whole answers and streams of chunks, in the shapes of OpenAI's two endpoints."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from lowq_cli.serving.http.fields import Asked
from lowq_cli.serving.http.hub import Live
from lowq_cli.serving.http.refusal import Refusal
from lowq_cli.serving.http.text import Names, Piece, Writer

DONE = b"data: [DONE]\n\n"
UNANSWERED = {"error": (500, "server_error"), "refused": (400, "invalid_request_error"), "cancelled": (503, "server_error")}
JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # `dumps` would make one for every token
HERE = uuid.uuid4().hex  # in a chunk, where its text belongs


def encoded(value: object) -> bytes:
    """JSON as bytes; half a surrogate pair, which a client may have sent, becomes a question mark."""
    return JSON.encode(value).encode("utf-8", "replace")


class Gone(Exception):  # no error: nobody is left to tell
    """The client has left."""


class Answer:
    """The answer to one HTTP request: its choices, from the events of its requests.

    Args:
        asked: the body.
        live: its requests, in the order of the choices.
        writers: one a choice.
        prompt_tokens: of all prompts together.
        echoes: what a choice's text begins with, one a choice.
    """

    def __init__(
        self, asked: Asked, live: Live, writers: list[Writer], prompt_tokens: int, names: Names, model: str, echoes: list[str]
    ) -> None:
        self.asked, self.live, self.writers, self.names, self.echoes = asked, live, writers, names, echoes
        self.prompt_tokens = prompt_tokens
        self.kind = "chat.completion" if asked.chat else "text_completion"
        name = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": name, "object": self.kind, "created": int(time.time()), "model": model}
        self.finish_reasons = [""] * len(writers)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises Refusal where it could not be computed, Gone."""
        texts, logprobs = list(self.echoes), [self._no_logprobs() for _ in self.writers]
        calls: list[list[dict[str, Any]]] = [[] for _ in self.writers]
        async for index, piece in self._pieces():
            texts[index] += piece.text
            calls[index] += [{k: v for k, v in c.items() if k != "index"} for c in piece.calls]
            self._add(logprobs[index], self._logprobs(index, piece))
        choices = []
        for index, text in enumerate(texts):
            said: dict[str, Any] = {"text": text}
            if self.asked.chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            if calls[index]:
                said["message"] |= {"content": text.strip() or None, "tool_calls": calls[index]}
            choice = {"index": index, **said, "logprobs": logprobs[index], "finish_reason": self.finish_reasons[index]}
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, an error among them. Raises Gone."""
        usage = {"usage": None} if self.asked.get("stream_options") else {}
        head = {**self.head, "object": f"{self.kind}.chunk"} if self.asked.chat else self.head

        def chunk(index: int, said: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> bytes:
            choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
            return b"data: " + encoded({**head, "choices": [choice], **usage}) + b"\n\n"

        for index, echo in enumerate(self.echoes):
            if self.asked.chat:
                yield chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}})
            elif echo:
                yield chunk(index, {"text": echo})
        around: dict[int, list[bytes]] = {}  # what is before and after the text of a choice: the same for all its tokens
        try:
            async for index, piece in self._pieces():
                logprobs = self._logprobs(index, piece)
                if piece.text and logprobs is None:
                    if index not in around:
                        said = {"delta": {"content": HERE}} if self.asked.chat else {"text": HERE}
                        around[index] = chunk(index, said).split(encoded(HERE))
                    before, after = around[index]
                    yield before + encoded(piece.text) + after
                elif piece.text or (logprobs and piece.logprobs):
                    said = {"delta": {"content": piece.text}} if self.asked.chat else {"text": piece.text}
                    yield chunk(index, said, logprobs)
                if piece.calls:
                    yield chunk(index, {"delta": {"tool_calls": piece.calls}})
                if piece.finish_reason:
                    yield chunk(index, {"delta": {}} if self.asked.chat else {"text": ""}, None, self.finish_reasons[index])
        except Refusal as refused:
            yield b"data: " + encoded(refused.body) + b"\n\n"
            return
        if usage:
            yield b"data: " + encoded({**head, "choices": [], "usage": self.usage()}) + b"\n\n"
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Tokens in and out so far."""
        made, cached = sum(w.tokens for w in self.writers), sum(w.cached for w in self.writers)
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": made, "total_tokens": self.prompt_tokens + made}
        return {**counts, "prompt_tokens_details": {"cached_tokens": min(cached, self.prompt_tokens)}}

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) until all have ended."""
        left = set(range(len(self.writers)))
        if self.asked.max_tokens == 0:  # nothing was asked for but the prompt
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
                if piece.finish_reason in UNANSWERED:
                    status, kind = UNANSWERED[piece.finish_reason]
                    raise Refusal(status, piece.error or "the server is stopping", kind)
                if piece.finish_reason:
                    self.finish_reasons[index] = piece.finish_reason
                    self.live.cancel(index)
                    left.discard(index)
                yield index, piece

    def _no_logprobs(self) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        if self.asked.chat:
            return {"content": [], "refusal": None}
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece's log-probabilities in the endpoint's shape."""
        found = self._no_logprobs()
        if found is None:
            return None
        for token, logprob, top, at in piece.logprobs:
            text = self.names.of(token)[0]
            if self.asked.chat:
                found["content"].append(self._named(token, logprob) | {"top_logprobs": [self._named(*t) for t in top]})
                continue
            likeliest = {self.names.of(t)[0]: value for t, value in top} | {text: logprob}
            row = {
                "tokens": text,
                "token_logprobs": logprob,
                "top_logprobs": likeliest,
                "text_offset": len(self.echoes[index]) + at,
            }
            self._add(found, {name: [value] for name, value in row.items()})
        return found

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.names.of(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}

    @staticmethod
    def _add(all_: dict[str, Any] | None, more: dict[str, Any] | None) -> None:
        for name, rows in (more or {}).items():
            if all_ is not None and rows is not None:
                all_[name] += rows
