"""OpenAI's /v1/responses. A request can continue a previous response by its id while the server keeps that conversation."""

import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from lowq_cli.serving.dialects.blocks import Block, blocks, whole_blocks
from lowq_cli.serving.dialects.response_tools import Offers, name_of, offered, unwritten, written
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.answers import Answer, event
from lowq_cli.serving.http.fields import items, maybe_items, shown, table, text
from lowq_cli.serving.http.refusal import Refusal, wrong

KEPT, KEPT_CHARACTERS = 1024, 64 << 20  # max. kept responses, and characters of their conversations
SAME = ("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "user", "metadata", "store")
HINTS = ("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
LOGPROBS = "message.output_text.logprobs"  # what a request includes to get log-probabilities
HARMLESS = ("include", "truncation", "max_tool_calls", "background", "stream_options", "context_management", "client_metadata")
OWN = {
    "input",
    "instructions",
    "previous_response_id",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "reasoning",
    "text",
    "prompt",
}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text"}
Messages = list[dict[str, Any]]


class Responses:
    """The dialect of /v1/responses, with the kept conversations."""

    name, media_type = "responses", "text/event-stream"

    def __init__(self) -> None:
        self.conversations: OrderedDict[str, tuple[Messages, int]] = OrderedDict()

    def read(self, body: dict[str, Any]) -> fields.Params:
        """Parse a body into a chat. Raises Refusal."""
        for name in ("conversation", "prompt"):
            if body.get(name) is not None:
                raise wrong(name, "is not kept here; send the messages as input")
        if body.get("background"):
            raise wrong("background", "is not supported; leave it out")
        chat: dict[str, Any] = {name: body[name] for name in (*SAME, *HINTS) if name in body}
        offers = offered(body.get("tools"))
        messages = self._before(body.get("previous_response_id")) + _messages(body.get("input"), offers)
        instructions = body.get("instructions")
        chat["messages"] = [*([{"role": "system", "content": instructions}] if instructions else []), *messages]
        if body.get("max_output_tokens") is not None:
            chat["max_tokens"] = body["max_output_tokens"]
        chat["tools"] = [offer.tool for offer in offers.values()]
        if chat["tools"] and body.get("tool_choice") is not None:
            chat["tool_choice"] = _choice(body["tool_choice"])
        chat |= _form(body.get("text"))
        wanted = LOGPROBS in maybe_items("include", body.get("include") or [])
        chat |= {"logprobs": True} if wanted or body.get("top_logprobs") else {}
        effort = table("reasoning", body.get("reasoning") or {}).get("effort")
        chat |= {"reasoning_effort": effort} if effort else {}
        rest = {name: v for name, v in body.items() if name not in OWN and name not in (*SAME, *HARMLESS, "conversation")}
        request = fields.read(chat | rest, chat=True)
        return replace(request, dialect={**body, "messages": messages, "offers": offers})

    def refused(self, why: Refusal) -> dict[str, Any]:
        """As OpenAI says it."""
        return why.body

    def failed(self, why: Refusal, answer: Answer) -> bytes:
        """The last event of a stream that ends with an error. Codex ignores the event "error" and would ask again and again."""
        error = {"code": why.code or why.type, "message": why.message}
        response = _response(answer, [], "failed") | {"error": error}
        return event({"type": "response.failed", "sequence_number": answer.events, "response": response}, "response.failed")

    def idle(self, answer: Answer) -> bytes:
        """The event that OpenAI sends then. Codex ends a stream without events after 300 s, and comments are none."""
        answer.events += 1
        return event({"type": "keepalive", "sequence_number": answer.events - 1}, "keepalive")

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        blocks = await whole_blocks(answer)
        self._keep(answer, blocks)
        return _response(answer, [_item(answer, b, "completed") for b in blocks])

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""

        def named(kind: str, **more: Any) -> bytes:
            answer.events += 1
            return event({"type": f"response.{kind}", "sequence_number": answer.events - 1, **more}, f"response.{kind}")

        for kind in ("created", "in_progress"):
            yield named(kind, response=_response(answer, [], "in_progress"))
        done: list[Block] = []
        async for block, change, more in blocks(answer):
            at = {"item_id": _id(answer, block), "output_index": block.number}
            place = at | ({} if block.kind == "call" else {"content_index": 0})
            custom = block.kind == "call" and answer.params.dialect["offers"][block.name].custom
            name, key = NAMES["custom" if custom else block.kind]
            if change == "begun":
                item = _item(answer, block, "in_progress")
                yield named(
                    "output_item.added",
                    output_index=block.number,
                    item=item | ({} if block.kind == "call" else {"content": []}),
                )
                if block.kind == "text":
                    yield named("content_part.added", **place, part=_text_part(Block("text", block.number)))
            elif change == "more" and not custom:
                yield named(f"{name}.delta", **place, delta=more, **_logprobs(block, block.new_logprobs()))
            elif change == "ended":
                done.append(block)
                text = written(block.arguments) if custom else block.text
                if custom:  # its text lies in JSON, and is known at the end
                    yield named(f"{name}.delta", **place, delta=text)
                yield named(f"{name}.done", **place, **{key: text}, **({} if custom else _named(answer, block)))
                if block.kind == "text":
                    yield named("content_part.done", **place, part=_text_part(block))
                yield named("output_item.done", output_index=block.number, item=_item(answer, block, "completed"))
        self._keep(answer, done)
        whole = _response(answer, [_item(answer, b, "completed") for b in done])
        yield named(whole["status"], response=whole)

    def _before(self, name: Any) -> Messages:
        """The conversation up to and including the response with this id, [] for None. Raises Refusal."""
        if name is None:
            return []
        conversation = self.conversations.get(text("previous_response_id", name))
        if conversation is None:
            line = f"the response {shown(name)} is not kept here (the last {KEPT} are); send the whole conversation as input"
            raise Refusal(404, line, param="previous_response_id", code="previous_response_not_found")
        self.conversations.move_to_end(name)
        return list(conversation[0])

    def _keep(self, answer: Answer, blocks: list[Block]) -> None:
        """Keep the conversation so that a request can continue it, unless `store` is false."""
        if answer.params.dialect.get("store") is False:
            return
        message: dict[str, Any] = {"role": "assistant", "content": "".join(b.text for b in blocks if b.kind == "text") or None}
        if thoughts := "".join(b.text for b in blocks if b.kind == "thought"):
            message["reasoning_content"] = thoughts
        if calls := [_call(b.id, b.name, b.text) for b in blocks if b.kind == "call"]:
            message["tool_calls"] = calls
        messages = [*answer.params.dialect["messages"], message]
        self.conversations[f"resp_{answer.id}"] = messages, len(json.dumps(messages, default=str))
        while len(self.conversations) > KEPT or sum(size for _, size in self.conversations.values()) > KEPT_CHARACTERS:
            self.conversations.popitem(last=False)


NAMES = {
    "text": ("output_text", "text"),
    "thought": ("reasoning_text", "text"),
    "call": ("function_call_arguments", "arguments"),
    "custom": ("custom_tool_call_input", "input"),
}
PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}


def _messages(given: Any, offers: Offers) -> Messages:
    """The items of an input as messages of a chat; what the assistant thought, said and called in a row is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: Messages = []
    for i, item in enumerate(items("input", given)):
        where = f"input[{i}]"
        kind = table(where, item).get("type", "message")
        if kind == "message":
            content = item.get("content")
            role = item.get("role")
            parts = _parts(f"{where}.content", content)
            if role == "assistant" and messages and messages[-1]["role"] == "assistant":
                messages[-1]["content"] = _joined(messages[-1].get("content"), parts)
            else:
                messages.append({"role": role, "content": parts})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _parts(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind in ("function_call", "custom_tool_call", "reasoning"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            if kind != "reasoning":
                arguments = item.get("arguments") if kind == "function_call" else unwritten(item.get("input"))
                call = _call(item.get("call_id"), name_of(item, offers), arguments)
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + "".join(
                    text(f"{where}.content", table(f"{where}.content", p).get("text"))
                    for p in maybe_items(f"{where}.content", item.get("content") or [])
                )
        else:
            raise wrong(f"{where}.type", f"{shown(kind)} is not supported")
    return messages


def _joined(before: Any, parts: Any) -> Any:
    """The content of an assistant's message with that of the next one."""
    if before is None:
        return parts
    return [p for c in (before, parts) for p in ([{"type": "text", "text": c}] if isinstance(c, str) else c)]


def _parts(where: str, given: Any) -> Any:
    """A string, or parts in the format of chats."""
    if isinstance(given, str):
        return given
    return [_part(f"{where}[{i}]", p) for i, p in enumerate(maybe_items(where, given or []))]


def _part(where: str, given: Any) -> dict[str, Any]:
    kind = table(where, given).get("type")
    if isinstance(kind, str) and kind in TEXTS:
        return {"type": "text", "text": given.get(TEXTS[kind])}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": given.get("image_url")}}
    raise wrong(f"{where}.type", f"{shown(kind)} is not supported; this server takes text and pictures")


def _call(id_: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if given.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": given.get("name")}}
    if given.get("type") == "allowed_tools" and given.get("mode") in ("auto", "required"):
        return given["mode"]
    raise wrong("tool_choice", f"{shown(given.get('type'))} is not supported")


def _form(given: Any) -> dict[str, Any]:
    """The form of the answer as a response_format of chats."""
    form = table("text", given or {}).get("format") or {"type": "text"}
    options: dict[str, Any] = {"verbosity": given["verbosity"]} if given and given.get("verbosity") else {}
    if table("text.format", form).get("type") == "json_schema":
        return options | {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
    return options | ({} if form.get("type") == "text" else {"response_format": {"type": form.get("type")}})


def _id(answer: Answer, block: Block) -> str:
    return f"{PREFIXES[block.kind]}_{answer.id}{block.number}"


def _text_part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _logprobs(block: Block, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"logprobs": rows} if block.kind == "text" else {}


def _named(answer: Answer, block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"name": answer.params.dialect["offers"][block.name].name}
    return _logprobs(block, block.logprobs)


def _item(answer: Answer, block: Block, status: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": _id(answer, block), "status": status}
    if block.kind == "text":
        return item | {"type": "message", "role": "assistant", "content": [_text_part(block)]}
    if block.kind == "thought":
        return item | {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": block.text}]}
    offer = answer.params.dialect["offers"][block.name]
    named = {"call_id": block.id, "name": offer.name} | ({"namespace": offer.namespace} if offer.namespace else {})
    if offer.custom:
        return item | {"type": "custom_tool_call", **named, "input": written(block.arguments)}
    return item | {"type": "function_call", **named, "arguments": block.text}


def _response(answer: Answer, output: list[dict[str, Any]], status: str = "") -> dict[str, Any]:
    """The response object of an answer; `status` overrides the final states "completed" and "incomplete"."""
    body, cut = answer.params.dialect, answer.finish_reasons[0] == "length"
    usage = answer.usage()
    counts = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
    settings = {
        name: body.get(name) for name in ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
    }
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": answer.model,
        "output": output,
        **settings,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": body.get("store", True),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None if status else counts,
    }
