"""OpenAI's /v1/chat/completions, with thoughts in a separate field as in DeepSeek's API."""

from collections.abc import AsyncIterator
from typing import Any

from lowq_cli.output.parts import Part
from lowq_cli.serving.dialects.blocks import logprobs_of
from lowq_cli.serving.dialects.completions import DONE, Around, OpenAi
from lowq_cli.serving.http.answers import Answer, event
from lowq_cli.serving.http.text import Piece


class Chat(OpenAi):
    """The dialect of /v1/chat/completions."""

    name, chat = "chat", True

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        n = len(answer.writers)
        messages, logprobs = [Message() for _ in range(n)], [_none(answer) for _ in range(n)]
        async for index, piece in answer.pieces():
            messages[index].add(piece.parts)
            before, more = logprobs[index], _logprobs(answer, piece)
            if before is not None and more is not None:
                before["content"] += more["content"]
        choices = [
            {"index": i, "message": m.table, "logprobs": logprobs[i], "finish_reason": answer.finish_reasons[i]}
            for i, m in enumerate(messages)
        ]
        return {**_head(answer, ""), "choices": choices, "usage": answer.usage()}

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        usage = {"usage": None} if answer.params.get("stream_options") else {}
        head = _head(answer, ".chunk")

        def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            return event({**head, "choices": [choice], **usage})

        for index in range(len(answer.writers)):
            yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
        around = Around(lambda index, text: chunk(index, {"content": text}))
        async for index, piece in answer.pieces():
            logprobs = _logprobs(answer, piece)
            if logprobs and logprobs["content"] and not piece.parts:
                yield chunk(index, {"content": ""}, logprobs)
            for part in piece.parts:
                yield (
                    around(index, part.text)
                    if part.kind == "text" and logprobs is None
                    else chunk(index, _delta(part), logprobs)
                )
                logprobs = None if logprobs is None else _none(answer)
            if piece.finish_reason:
                yield chunk(index, {}, None, piece.finish_reason)
        if usage:
            yield event({**head, "choices": [], "usage": answer.usage()})
        yield DONE


class Message:
    """The whole message, joined from its parts."""

    def __init__(self) -> None:
        self.text = self.thoughts = ""
        self.calls: list[dict[str, Any]] = []

    def add(self, parts: list[Part]) -> None:
        """More of it."""
        for p in parts:
            if p.kind == "text":
                self.text += p.text
            elif p.kind == "thought":
                self.thoughts += p.text
            elif p.kind == "call":
                self.calls.append({"id": p.id, "type": "function", "function": {"name": p.text, "arguments": ""}})
            else:
                self.calls[p.index]["function"]["arguments"] += p.text

    @property
    def table(self) -> dict[str, Any]:
        """As OpenAI has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        return message | ({"content": self.text.strip() or None, "tool_calls": self.calls} if self.calls else {})


def _delta(part: Part) -> dict[str, Any]:
    if part.kind == "text":
        return {"content": part.text}
    if part.kind == "thought":
        return {"reasoning_content": part.text}
    if part.kind == "call":
        named = {"id": part.id, "type": "function", "function": {"name": part.text, "arguments": ""}}
        return {"tool_calls": [{"index": part.index, **named}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    name, kind = f"chatcmpl-{answer.id}", f"chat.completion{kind}"
    return {"id": name, "object": kind, "created": answer.created, "model": answer.model}


def _none(answer: Answer) -> dict[str, Any] | None:
    return None if answer.params.logprobs is None else {"content": [], "refusal": None}


def _logprobs(answer: Answer, piece: Piece) -> dict[str, Any] | None:
    """A piece's log-probabilities in OpenAI's format; None if not requested."""
    table = _none(answer)
    if table is not None:
        table["content"] = logprobs_of(answer, piece)
    return table
