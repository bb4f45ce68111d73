"""Orders of messages for chat templates that take only some of what clients send.

Coding agents send several system messages, also in the middle of a conversation, users' messages in a row, and users' messages
after a tool's result. Templates refuse one or the other ("System message must be at the beginning", "roles must alternate"),
or leave a later system message out.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lowq_cli.hf.chat_template import TemplateRefusal

Message = dict[str, Any]


def rendered(messages: list[Message], render: Callable[[list[Message]], str]) -> str:
    """The prompt of the first order that the template renders with every system message in it.

    If none has every later system message, it is the first that the template renders at all. Raises what `render` does; for a
    template that refuses all orders, its reason for the first one.
    """
    refusal: TemplateRefusal | None = None
    incomplete: str | None = None
    for order in _orders(messages):
        try:
            prompt = render(order)
        except TemplateRefusal as e:
            refusal = refusal or e
            continue
        if all(text.strip() in prompt for message in messages[1:] if message["role"] == "system" for text in _texts(message)):
            return prompt
        incomplete = prompt if incomplete is None else incomplete
    if incomplete is not None:
        return incomplete
    assert refusal is not None  # `_orders` yields at least one order
    raise refusal


def _orders(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages as they are, then with ever fewer changes of role."""
    yield messages
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    turns = _joined([*messages[:begin], *({**m, "role": "user"} if m["role"] == "system" else m for m in messages[begin:])])
    yield turns
    answered = _joined(turns, after_tools=True)
    yield answered
    if len(answered) > 1 and [m["role"] for m in answered[:2]] == ["system", "user"]:
        yield [{**answered[1], "content": _both(answered[0]["content"], answered[1]["content"])}, *answered[2:]]


def _joined(messages: list[Message], after_tools: bool = False) -> list[Message]:
    """Neighbours of one role as one message. after_tools: a user's message after a tool's result becomes a part of it."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else {"role": ""}
        same = last["role"] == message["role"] != "tool" or (
            after_tools and (last["role"], message["role"]) == ("tool", "user")
        )
        if same:
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            turns[-1] = {**message, **last, "content": _both(last["content"], message["content"])}
            turns[-1] |= {"tool_calls": calls} if calls else {}
        else:
            turns.append(message)
    return turns


def _both(first: Any, second: Any) -> Any:
    """Two contents as one: a text, or parts if one of them has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [p for c in (first, second) for p in ([{"type": "text", "text": c}] if isinstance(c, str) else c)]


def _texts(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]
