"""Renders the messages of a chat: checks them, converts them to the form that chat templates expect, applies the template."""

import hashlib
import re
from typing import Any

from lowq_cli.engine.tokenizer import LoadedTokenizer
from lowq_cli.output.json_text import as_object
from lowq_cli.output.syntaxes import Syntax, switches
from lowq_cli.serving.http import fields
from lowq_cli.serving.http.fields import Params, items, shown, table, text
from lowq_cli.serving.http.message_order import rendered
from lowq_cli.serving.http.refusal import Refusal, wrong
from lowq_packers.errors import LowqError, UnsupportedError, is_no_refusal, one_line

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
OURS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "return_dict", "conversations")
NINE = re.compile(r"length\s*!=\s*9\b")  # found in Mistral's templates, which refuse call ids that do not have nine characters


def template_of(tokenizer: LoadedTokenizer, tools: bool) -> str:
    """The model's chat template. Raises Refusal if it has none."""
    try:
        template = tokenizer.template(tools)
    except UnsupportedError as e:
        raise Refusal(400, str(e), param="messages") from None
    if not template:
        raise Refusal(400, "this model has no chat template; use /v1/completions", param="messages")
    return template


def prompt_text(tokenizer: LoadedTokenizer, params: Params, tools: list[dict[str, Any]], syntax: Syntax) -> str:
    """The rendered prompt, up to the answer. Raises Refusal for messages that are invalid or refused by the template."""
    template = template_of(tokenizer, bool(tools))
    messages = [_message(f"messages[{i}]", m) for i, m in enumerate(params.get("messages"))]
    if NINE.search(template):
        shorten_ids(messages)
    for message in messages:
        if "reasoning_content" in message:  # renamed as the template expects
            message |= {name: message["reasoning_content"] for name in ("reasoning", "thinking") if name in template}
    more = switches(template, params.think, params.effort) | _switches(template, params.get("chat_template_kwargs", {}))
    if tools:
        if "tools" not in template:
            raise wrong("tools", "this model's chat template has no place for them")
        more["tools"] = tools

    def render(messages: list[dict[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, return_dict=False, **more
        )
        return text

    try:
        text = rendered(messages, render)
    except LowqError as e:
        raise Refusal(400, one_line(e), param="messages") from e
    except Exception as e:  # templates are third-party code and may raise anything: blamed on the messages
        if is_no_refusal(e):
            raise
        why = f"the model's chat template refuses these messages: {one_line(e)}"
        raise Refusal(400, why, param="messages") from e
    # strings that only the template writes, too: those of tools, and of arguments, which are JSON inside JSON
    return syntax.begun(fields.text("messages or tools", text), params.think)


def shorten_ids(messages: list[dict[str, Any]]) -> None:
    """Replace call ids by ones of nine letters and digits, the same for a call and its result."""
    for named, key in [(m, "tool_call_id") for m in messages] + [(c, "id") for m in messages for c in m.get("tool_calls", ())]:
        given = named.get(key)
        if isinstance(given, str) and not (len(given) == 9 and given.isalnum()):
            named[key] = hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:9]


def _switches(template: str, given: dict[str, Any]) -> dict[str, Any]:
    """The request's variables for the template, such as Qwen 3's enable_thinking; without those that the server sets."""
    for name, value in given.items():
        if name in OURS or not re.search(rf"\b{re.escape(name)}\b", template):
            raise wrong("chat_template_kwargs", f"this model's chat template knows no switch {shown(name)}")
        if not isinstance(value, str | bool | int | float):
            raise wrong(f"chat_template_kwargs.{name}", f"must be a text, a number, true or false, not {shown(value)}")
    return dict(given)


def _message(name: str, given: Any) -> dict[str, Any]:
    message = table(name, given)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    translated = {k: v for k, v in message.items() if k in ("name", "tool_call_id", "reasoning_content") and v is not None}
    if isinstance(message.get("reasoning"), str):  # the name in OpenRouter and vLLM
        translated.setdefault("reasoning_content", message["reasoning"])
    calls = message.get("tool_calls")
    if calls is not None:
        translated["tool_calls"] = [
            _call(f"{name}.tool_calls[{i}]", c) for i, c in enumerate(items(f"{name}.tool_calls", calls))
        ]
    content = message.get("content")
    if content is None and role != "assistant":
        raise wrong(f"{name}.content", "is needed")
    return {"role": ROLES[role], "content": "" if content is None else _content(f"{name}.content", content), **translated}


def _content(name: str, content: Any) -> str | list[dict[str, str]]:
    """The content as a string, or as parts if it has image placeholders (`pictures.take`)."""
    if not isinstance(content, list):
        return text(name, content)
    parts: list[dict[str, str]] = []
    for i, given in enumerate(content):
        part = table(f"{name}[{i}]", given)
        kind = part.get("type")
        if kind not in ("text", "refusal", "image"):
            raise wrong(f"{name}[{i}].type", f"{shown(kind)} is not supported; this server takes texts and pictures")
        piece = {} if kind == "image" else {"text": text(f"{name}[{i}].{kind}", part.get(kind))}
        parts.append({"type": "text" if piece else "image", **piece})
    return parts if any(p["type"] == "image" for p in parts) else "".join(p["text"] for p in parts)


def _call(name: str, given: Any) -> dict[str, Any]:
    """An earlier call of the model with its arguments as an object, which is what templates expect.

    They are {} where the model wrote something else: clients repeat a call in every later request, so a refusal would end the
    conversation. The call's result tells the model what was wrong.
    """
    function = table(f"{name}.function", table(name, given).get("function"))
    arguments = as_object(text(f"{name}.function.arguments", function.get("arguments") or ""))
    named = {"name": text(f"{name}.function.name", function.get("name")), "arguments": arguments}
    return {"id": given.get("id"), "type": "function", "function": named}
