"""The tools of /v1/responses that a client runs: functions, functions in namespaces, and tools that take a text.

Codex offers the tools of MCP servers and of its sub-agents in namespaces, and its patches as a "custom" tool, whose argument is
a text in a grammar and not JSON. A model knows functions alone: each tool is offered as a function, and calls are translated.
"""

import json
from dataclasses import dataclass
from typing import Any

from lowq_cli.serving.http.fields import maybe_items, table, text

TEXT = "input"  # the parameter that holds the text of a custom tool


@dataclass(frozen=True)
class Offer:
    """A tool as the client named it, and as a function of a chat. custom: whether its argument is a text."""

    name: str
    namespace: str
    custom: bool
    tool: dict[str, Any]


Offers = dict[str, Offer]  # the function's name -> the tool


def offered(given: Any) -> Offers:
    """The tools of a body. Those that run on OpenAI's servers do not exist here and are left out. Raises Refusal."""
    offers: Offers = {}
    for i, tool in enumerate(maybe_items("tools", given or [])):
        where = f"tools[{i}]"
        kind = table(where, tool).get("type")
        if kind == "namespace":
            space = text(f"{where}.name", tool.get("name"))
            for j, inner in enumerate(maybe_items(f"{where}.tools", tool.get("tools") or [])):
                _add(offers, f"{where}.tools[{j}]", table(f"{where}.tools[{j}]", inner), space)
        else:
            _add(offers, where, tool, "")
    return offers


def name_of(call: dict[str, Any], offers: Offers) -> Any:
    """The function's name of an earlier call."""
    name, space = call.get("name"), call.get("namespace") or ""
    return next((key for key, offer in offers.items() if (offer.name, offer.namespace) == (name, space)), name)


def written(arguments: dict[str, Any]) -> str:
    """The text of a custom tool in the arguments of its function."""
    value = arguments.get(TEXT, "")
    return value if isinstance(value, str) else json.dumps(value)


def unwritten(value: Any) -> str:
    """The arguments of a custom tool's function, as JSON, for an earlier text."""
    return json.dumps({TEXT: value}, ensure_ascii=False)


def _add(offers: Offers, where: str, tool: dict[str, Any], space: str) -> None:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        return
    name = text(f"{where}.name", tool.get("name"))
    key = f"{space}__{name}" if name in offers else name  # two servers may have a tool of one name
    function = {"name": key} | {k: tool[k] for k in ("description", "parameters") if tool.get(k) is not None}
    if kind == "custom":
        form = table(f"{where}.format", tool.get("format") or {})
        grammar = f"a text in this {form.get('syntax')} grammar:\n{form.get('definition')}"
        parameter = {"type": "string"} | ({"description": grammar} if form.get("type") == "grammar" else {})
        function["parameters"] = {"type": "object", "properties": {TEXT: parameter}, "required": [TEXT]}
    offers[key] = Offer(name, space, kind == "custom", {"type": "function", "function": function})
