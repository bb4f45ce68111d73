"""Anthropic's /v1/messages, which coding agents use."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from lowq_cli.serving.dialects.blocks import Block, blocks, whole_blocks
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.answers import Answer, event
from lowq_cli.serving.http.fields import boolean, items, maybe_items, shown, table, text
from lowq_cli.serving.http.refusal import Refusal, wrong

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
TYPES |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
SAME = ("model", "stream", "temperature", "top_p", "top_k")  # fields with the same name in OpenAI's chats
HARMLESS = ("metadata", "service_tier", "container", "context_management", "inference_geo", "cache_control", "betas", "speed")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A line of Claude Code's for Anthropic's billing. It differs between sessions, which then would share no cached prompt.
BILLING = "x-anthropic-billing-header:"
# Of thoughts. It is not checked, but Copilot does not send thoughts without one back, which the model then would not see again.
SIGNATURE = "bG93cQ=="
Functions = dict[str, dict[str, Any]]  # name -> the function of a chat
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """The dialect of /v1/messages."""

    name, media_type = "messages", "text/event-stream"

    def read(self, body: dict[str, Any]) -> fields.Params:
        """Parse a body into a chat. Raises Refusal."""
        chat: dict[str, Any] = {name: body[name] for name in SAME if name in body}
        known = {"messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking", "output_config"}
        tools = [_tool(f"tools[{i}]", t) for i, t in enumerate(maybe_items("tools", body.get("tools") or [])) if _own(t)]
        functions = {t["function"]["name"]: t["function"] for t in tools if isinstance(t["function"]["name"], str)}
        chat["messages"] = _system(body.get("system"))
        for i, message in enumerate(items("messages", body.get("messages"))):
            chat["messages"] += _message(f"messages[{i}]", message, functions)
        if body.get("max_tokens") is not None:
            chat["max_tokens"] = body["max_tokens"]
        if body.get("stop_sequences"):
            chat["stop"] = body["stop_sequences"]
        if body.get("tools"):
            chat["tools"] = tools
            chat |= _choice(body.get("tool_choice")) if chat["tools"] else {}
        chat |= _thinking(body.get("thinking"), body.get("output_config"))
        rest = {name: value for name, value in body.items() if name not in known and name not in (*SAME, *HARMLESS)}
        return replace(fields.read(chat | rest, chat=True), dialect=body)

    def refused(self, why: Refusal) -> dict[str, Any]:
        """The body of an error response in Anthropic's format."""
        kind = TYPES.get(why.status, "invalid_request_error" if why.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": why.message}}

    def failed(self, why: Refusal, answer: Answer) -> bytes:
        """The last event of a stream that ends with an error."""
        return event(self.refused(why), "error")

    def idle(self, answer: Answer) -> bytes:
        """Anthropic's event for it."""
        return event({"type": "ping"}, "ping")

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        content = [_content(b) | _filled(b) for b in await whole_blocks(answer)]
        return _head(answer) | {"content": content, **_ending(answer), "usage": _usage(answer)}

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""

        def named(kind: str, **more: Any) -> bytes:
            return event({"type": kind, **more}, kind)

        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield named("message_start", message=_head(answer) | nothing | {"usage": _usage(answer)})
        yield self.idle(answer)
        async for block, change, more in blocks(answer):
            if change == "begun":
                yield named("content_block_start", index=block.number, content_block=_content(block))
            elif change == "more":
                yield named("content_block_delta", index=block.number, delta=_delta(block, more))
            else:
                if block.kind == "thought":
                    signed = {"type": "signature_delta", "signature": SIGNATURE}
                    yield named("content_block_delta", index=block.number, delta=signed)
                yield named("content_block_stop", index=block.number)
        yield named("message_delta", delta=_ending(answer), usage=_usage(answer))
        yield named("message_stop")


def _system(given: Any) -> list[dict[str, Any]]:
    if not given:
        return []
    parts = (
        [given]
        if isinstance(given, str)
        else [table(f"system[{i}]", p).get("text") for i, p in enumerate(items("system", given))]
    )
    texts = [t for i, p in enumerate(parts) if not (t := text(f"system[{i}].text", p)).startswith(BILLING)]
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _message(name: str, given: Any, functions: Functions) -> list[dict[str, Any]]:
    """An Anthropic message as messages of a chat, in which each tool result is a separate message."""
    role, content = table(name, given).get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{name}.role", f"must be user or assistant, not {shown(role)}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    whole: dict[str, Any] = {"role": role}
    for i, block in enumerate(items(f"{name}.content", content)):
        where = f"{name}.content[{i}]"
        kind = table(where, block).get("type")
        if kind == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _result(where, block.get("content"), functions),
                }
            )
        elif kind == "tool_use":
            arguments = json.dumps(table(f"{where}.input", block.get("input", {})), ensure_ascii=False)
            call = {"id": block.get("id"), "type": "function", "function": {"name": block.get("name"), "arguments": arguments}}
            whole.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            whole["reasoning_content"] = whole.get("reasoning_content", "") + text(f"{where}.thinking", block.get("thinking"))
        elif kind != "redacted_thinking":
            parts.append(_part(where, block))
    if parts or len(whole) > 1:
        messages.append(whole | {"content": parts or None})
    return messages


def _part(where: str, block: dict[str, Any]) -> dict[str, Any]:
    """A text or image block as a part of a chat message."""
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": source.get("url") if source.get("type") == "url" else data}}
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    raise wrong(f"{where}.type", f"{shown(kind)} is not supported; this server takes text and pictures")


def _result(where: str, content: Any, functions: Functions) -> Any:
    """The result of a tool as text. References to tools, which a search for tools results in, become their descriptions."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = [table(f"{where}.content[{i}]", b) for i, b in enumerate(items(f"{where}.content", content) if content else [])]
    references = [b.get("tool_name") for b in blocks if b.get("type") == "tool_reference"]
    parts = [_part(f"{where}.content[{i}]", b) for i, b in enumerate(blocks) if b.get("type") != "tool_reference"]
    if lines := [json.dumps(functions[n], ensure_ascii=False) for n in references if isinstance(n, str) and n in functions]:
        each = "\n".join(f"<function>{line}</function>" for line in lines)
        parts.append({"type": "text", "text": f"<functions>\n{each}\n</functions>"})  # as Claude Code's ToolSearch announces
    return parts or ""


def _own(tool: Any) -> bool:
    """Whether the client runs this tool; tools of Anthropic's servers do not exist here and are not offered to the model."""
    return not isinstance(tool, dict) or tool.get("type", "custom") == "custom"


def _tool(name: str, given: Any) -> dict[str, Any]:
    tool = table(name, given)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    later = {"defer_loading": True} if tool.get("defer_loading") is True else {}
    return {
        "type": "function",
        "function": function | ({"description": tool["description"]} if tool.get("description") else {}),
        **later,
    }


def _choice(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    kind = table("tool_choice", given).get("type")
    fields_out: dict[str, Any] = {"tool_choice": CHOICES.get(kind) if isinstance(kind, str) else None}
    if kind == "tool":
        fields_out["tool_choice"] = {"type": "function", "function": {"name": given.get("name")}}
    elif fields_out["tool_choice"] is None:
        raise wrong("tool_choice.type", f"must be auto, any, tool or none, not {shown(kind)}")
    once = boolean("tool_choice.disable_parallel_tool_use", given.get("disable_parallel_tool_use") or False)
    return fields_out | {"parallel_tool_calls": not once}


def _thinking(given: Any, output: Any) -> dict[str, Any]:
    """The settings of thinking and of the output's form in a body; without them the model decides how much to think."""
    fields_out: dict[str, Any] = {}
    if given is not None:
        kind = table("thinking", given).get("type")
        if kind == "disabled":
            fields_out["reasoning_effort"] = "none"
        elif kind == "enabled":
            fields_out["thinking_token_budget"] = given.get("budget_tokens")
        elif kind != "adaptive":
            raise wrong("thinking.type", f"must be enabled, disabled or adaptive, not {shown(kind)}")
    if output is not None and "reasoning_effort" not in fields_out:
        effort = table("output_config", output).get("effort")
        fields_out |= {"reasoning_effort": effort} if effort else {}
        form = output.get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            fields_out["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return fields_out


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _content(block: Block) -> dict[str, Any]:
    """The content block of an event that begins a block."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _filled(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"input": block.arguments}
    return {"thinking": block.text, "signature": SIGNATURE} if block.kind == "thought" else {"text": block.text}


def _delta(block: Block, more: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": more}
    return {"type": "thinking_delta", "thinking": more} if block.kind == "thought" else {"type": "text_delta", "text": more}


def _ending(answer: Answer) -> dict[str, Any]:
    stop = answer.writers[0].stopped
    reason = "stop_sequence" if stop else REASONS.get(answer.finish_reasons[0], "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop or None}


def _usage(answer: Answer) -> dict[str, Any]:
    """The usage in Anthropic's format, which counts tokens found in the cache separately from input tokens."""
    usage = answer.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    read = {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
    return read | {"output_tokens": usage["completion_tokens"]}
