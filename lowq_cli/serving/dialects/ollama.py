"""ollama's /api/chat and /api/generate, and the entries of its lists of models."""

import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lowq_cli.serving.dialects.blocks import Block, blocks, whole_blocks
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.answers import Answer, encoded
from lowq_cli.serving.http.fields import items, shown, table
from lowq_cli.serving.http.refusal import Refusal, wrong

VERSION = "0.13.0"  # version of ollama's API; clients check that it is new enough
LATEST = ":latest"  # the tag that ollama's clients append to a name without a tag
# Ollama's option -> our field; None: ignored.
OPTIONS = {"num_predict": "max_tokens", "repeat_last_n": None, "penalize_newline": None, "min_p": "min_p"}
NOT_TAKEN = ("video", "videos", "audio", "audios", "files")  # refused fields of a message; other unknown ones are ignored


class Ollama:
    """The dialect of /api/chat, or of /api/generate if `chat` is false."""

    media_type = "application/x-ndjson"

    def __init__(self, chat: bool) -> None:
        self.chat, self.name = chat, "api/chat" if chat else "api/generate"

    def read(self, body: dict[str, Any]) -> fields.Params:
        """Parse a body into a chat, or with `raw` a completion; without a prompt it only loads the model, or unloads it if
        keep_alive is 0. Raises Refusal."""
        known = {"model", "messages", "prompt", "system", "images", "tools", "format", "options", "stream", "think", "raw"}
        known |= {"logprobs", "top_logprobs"}
        raw = not self.chat and bool(body.get("raw"))
        request: dict[str, Any] = {"stream": body.get("stream") is not False}
        if body.get("model") is not None:
            request["model"] = str(body["model"]).removesuffix(LATEST)
        for name in ("suffix", "template", "context"):
            if body.get(name):
                raise wrong(name, "is not supported; leave it out")
        if body.get("messages" if self.chat else "prompt") in (None, "", []) and not body.get("images"):
            loads = fields.read(request | {"prompt": [0], "max_tokens": 0}, chat=False)
            return replace(loads, dialect={"loads": True, "unloads": _is_zero(body.get("keep_alive")), "chat": self.chat})
        if raw:
            request["prompt"] = body.get("prompt")
        elif self.chat:
            request["messages"] = [_message(f"messages[{i}]", m) for i, m in enumerate(items("messages", body.get("messages")))]
        else:
            system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
            request["messages"] = [
                *system,
                _message("prompt", {"role": "user", "content": body.get("prompt"), "images": body.get("images")}),
            ]
        if body.get("tools") and not raw:
            request["tools"] = body["tools"]
        if fields.boolean("logprobs", body.get("logprobs") or False):
            top = body.get("top_logprobs") or 0
            request |= {"logprobs": top} if raw else {"logprobs": True, "top_logprobs": top}
        request |= _form(body.get("format")) | ({} if raw else _think(body.get("think")))
        for name, value in table("options", body.get("options") or {}).items():
            ours = OPTIONS.get(name, name)
            if ours is not None and not (ours == "max_tokens" and isinstance(value, int) and value < 0):
                request[ours] = value
        if raw:
            request.setdefault("max_tokens", fields.INT64)  # no limit, as in ollama
        rest = {name: value for name, value in body.items() if name not in known}
        plain = None if self.chat or raw or body.get("images") else self.read(body | {"raw": True})  # as ollama's own template
        return replace(fields.read(request | rest, chat=not raw), dialect={"began": time.monotonic_ns()}, plain=plain)

    def refused(self, why: Refusal) -> dict[str, Any]:
        """As ollama says it."""
        return {"error": why.message}

    def failed(self, why: Refusal, answer: Answer) -> bytes:
        """The last line of a stream that ends with an error."""
        return encoded(self.refused(why)) + b"\n"

    def idle(self, answer: Answer) -> bytes:
        """A line without text."""
        return encoded(self._said(answer, []) | {"done": False}) + b"\n"

    async def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        return self._said(answer, await whole_blocks(answer)) | _ending(answer)

    async def chunks(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer as lines of JSON; a call is sent when it is complete."""
        async for block, change, more in blocks(answer):
            if block.kind == "call" and change == "ended":
                yield encoded(self._said(answer, [block]) | {"done": False}) + b"\n"
            elif block.kind != "call" and change == "more":
                new = replace(block, text=more, logprobs=block.new_logprobs(), taken=0)
                yield encoded(self._said(answer, [new]) | {"done": False}) + b"\n"
        yield encoded(self._said(answer, []) | _ending(answer)) + b"\n"

    def _said(self, answer: Answer, blocks: list[Block]) -> dict[str, Any]:
        text = "".join(b.text for b in blocks if b.kind == "text")
        thoughts = "".join(b.text for b in blocks if b.kind == "thought")
        calls = [
            {"function": {"index": i, "name": b.name, "arguments": b.arguments}}
            for i, b in enumerate(blocks)
            if b.kind == "call"
        ]
        head: dict[str, Any] = {"model": answer.model, "created_at": _now()}
        rows = [row for b in blocks for row in b.new_logprobs()]
        head |= {"logprobs": rows} if rows else {}
        more = ({"thinking": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
        if self.chat:
            return head | {"message": {"role": "assistant", "content": text, **more}}
        return head | {"response": text, **more}


def _message(name: str, given: Any) -> dict[str, Any]:
    """An ollama message as a chat message; ollama has images in a separate field, arguments as objects, calls without ids."""
    message = table(name, given)
    translated: dict[str, Any] = {"role": message.get("role"), "content": message.get("content")}
    for other in NOT_TAKEN:
        if message.get(other):
            raise wrong(f"{name}.{other}", "is not taken: this server takes texts and pictures")
    if images := message.get("images"):
        urls = [i if str(i).startswith("data:") else f"data:image;base64,{i}" for i in items(f"{name}.images", images)]
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        translated["content"] = [*pictures, {"type": "text", "text": message.get("content") or ""}]
    if message.get("thinking"):
        translated["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        translated["tool_calls"] = []
        for i, call in enumerate(items(f"{name}.tool_calls", message["tool_calls"])):
            where = f"{name}.tool_calls[{i}].function"
            function = table(where, table(where, call).get("function"))
            arguments = json.dumps(table(f"{where}.arguments", function.get("arguments") or {}), ensure_ascii=False)
            id_ = call.get("id") or f"call_{function.get('name')}"
            translated["tool_calls"].append({"id": id_, "function": {"name": function.get("name"), "arguments": arguments}})
    if message.get("role") == "tool":
        called = message.get("tool_name") or message.get("name")
        translated |= {"tool_call_id": message.get("tool_call_id") or f"call_{called}"} | ({"name": called} if called else {})
    return translated


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _is_zero(duration: Any) -> bool:
    """Whether a duration, a number of seconds or one with a unit, is 0."""
    return not isinstance(duration, bool) and re.fullmatch(r"0+(\.0*)?(ns|us|ms|s|m|h)?", str(duration)) is not None


def _form(given: Any) -> dict[str, Any]:
    if given in (None, ""):
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": given}}}


def _think(given: Any) -> dict[str, Any]:
    if given is None or given is True:
        return {}
    if given is False or isinstance(given, str):
        return {"reasoning_effort": given or "none"}
    raise wrong("think", f"must be true, false or a word, not {shown(given)}")


def _ending(answer: Answer) -> dict[str, Any]:
    """The fields of the last line: the reason of the end, and durations in nanoseconds."""
    if answer.params.dialect.get("loads"):
        return {"done": True, "done_reason": "load"}
    usage, now = answer.usage(), time.monotonic_ns()
    live, began = answer.live, answer.params.dialect["began"]
    first = int(live.first * 1e9) or now
    read = max(0, first - int(live.began * 1e9))
    return {
        "done": True,
        "done_reason": "length" if answer.finish_reasons[0] == "length" else "stop",
        "total_duration": now - began,
        "load_duration": max(0, int(live.began * 1e9) - began),
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": read,
        "eval_count": usage["completion_tokens"],
        "eval_duration": max(0, now - first),
    }


def unloaded(params: fields.Params) -> dict[str, Any]:
    """The answer to a request that only unloads a model."""
    text = {"message": {"role": "assistant", "content": ""}} if params.dialect["chat"] else {"response": ""}
    return {"model": params.get("model"), "created_at": _now(), **text, "done": True, "done_reason": "unload"}


def embedding(body: dict[str, Any]) -> dict[str, Any]:
    """A body of /api/embeddings, which has one text and whose vectors have any length, in the format of /api/embed."""
    return {"normalize": False, "input": body.get("prompt")} | {n: v for n, v in body.items() if n != "prompt"}


def described(model: dict[str, Any], size: int = 0) -> dict[str, Any]:
    """An entry of /v1/models in the format of /api/tags, whose size is that on disk (`size`), and of /api/ps, in memory."""
    changed = datetime.fromtimestamp(model["created"], UTC).isoformat().replace("+00:00", "Z")
    memory = model.get("bytes") or 0
    details = {"parent_model": "", "format": "safetensors", "family": "", "families": []}
    details |= {"parameter_size": "", "quantization_level": ""}
    digest = hashlib.sha256(model["id"].encode(errors="replace")).hexdigest()
    head = {"name": model["id"], "model": model["id"], "modified_at": changed, "size": size or memory}
    return head | {"digest": digest, "details": details, "size_vram": memory, "context_length": model.get("max_model_len", 0)}


def shown_model(model: dict[str, Any]) -> dict[str, Any]:
    """An entry of /v1/models in the format of /api/show."""
    features = model.get("features", [])
    can = {"completion": True, "tools": "tools" in features, "thinking": "thinking" in features, "vision": "images" in features}
    settings = "\n".join(f"{name} {value}" for name, value in (model.get("sampling") or {}).items())
    description = described(model)
    info = {
        "general.architecture": "lowq",
        "general.basename": model["id"],
        "lowq.context_length": model.get("max_model_len", 0),
    }
    return {
        "modelfile": f"FROM {model['id']}\n",
        "parameters": settings,
        "template": "",
        "details": description["details"],
        "model_info": info,
        "modified_at": description["modified_at"],
        "capabilities": [name for name, has in can.items() if has],
    }
