"""Calls of tools: what a request offers, how a model is made to call one, and calls read out of its text.

A model writes a call as its chat template taught it: as {"name": ..., "arguments": ...} between <tool_call> tags (Hermes,
Qwen), or as that object alone or in an array, where the answer begins with it (Llama, whose word is "parameters"; Mistral).
"""

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowq_cli.serving.http.fields import Asked, shown, table, text
from lowq_cli.serving.http.grammar import Grammars
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.request import Mask

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """The functions that a request offers. choice: "none", "auto", "required" or a function's name."""

    given: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "none"
    several: bool = True

    @property
    def names(self) -> list[str]:
        """Of the functions that may be called."""
        return [t["function"]["name"] for t in self.given]

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice not in ("none", "auto")


def read(asked: Asked) -> Tools:
    """The tools of a body and which may be called. Raises Refusal."""
    given = [_tool(f"tools[{i}]", t) for i, t in enumerate(asked.get("tools", []))]
    choice = asked.get("tool_choice", "auto" if given else "none")
    if isinstance(choice, dict):
        choice = text("tool_choice.function.name", table("tool_choice.function", choice.get("function")).get("name"))
        if choice not in [t["function"]["name"] for t in given]:
            raise wrong("tool_choice", f"{shown(choice)} is none of the tools")
    elif choice not in ("none", "auto", "required"):
        raise wrong("tool_choice", f"must be none, auto, required or one of the tools, not {shown(choice)}")
    elif choice == "required" and not given:
        raise wrong("tool_choice", "required needs tools to choose from; there are none")
    choice = choice if given else "none"
    return Tools(given if choice != "none" else [], choice, asked.get("parallel_tool_calls", True))


def _tool(name: str, given: Any) -> dict[str, Any]:
    if table(name, given).get("type") != "function":
        raise wrong(f"{name}.type", f"must be function, not {shown(given.get('type'))}")
    function = table(f"{name}.function", given.get("function"))
    if not NAME.fullmatch(text(f"{name}.function.name", function.get("name"))):
        raise wrong(f"{name}.function.name", "must be up to 64 letters, digits, and . _ -")
    table(f"{name}.function.parameters", function.get("parameters") or {})
    return {"type": "function", "function": function}


def form(tools: Tools, template: str, grammars: Grammars) -> Callable[[], Mask] | None:
    """What makes masks under which the answer is a call, as the template has calls; None where it need not be one."""
    if not tools.forced:
        return None
    offered = [t["function"] for t in tools.given if tools.choice in ("required", t["function"]["name"])]
    key = "parameters" if OPEN not in template and '"parameters"' in template else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, key: f.get("parameters") or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for f in offered
    ]
    schema = {"anyOf": calls}
    if OPEN not in template:
        return grammars.schema(schema, "tools")
    spaced = {**schema, "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    return grammars.lark(f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {json.dumps(spaced)}\n', "tools")


class Reader:
    """Text of one answer in; text without the calls, and the calls, out."""

    def __init__(self, tools: Tools) -> None:
        self.tools, self.held, self.calls = tools, "", 0
        self.inside = self.begun = self.bare = False

    def push(self, piece: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        """(text, calls) that are certain now."""
        self.held += piece
        if not self.begun and (first := self.held.lstrip()[:1]):
            self.begun, self.bare = True, first in "{["
        if self.bare:  # JSON from its first character on: a call, or an answer that is JSON, as its end will show
            if not ended:
                return "", []
            found, text = self._calls(self.held), self.held
            self.held = ""
            return ("", found) if found else (text, [])
        said, calls = "", list[dict[str, Any]]()
        while self.held:
            tag = CLOSE if self.inside else OPEN
            before, found_tag, after = self.held.partition(tag)
            if not found_tag:
                break
            self.held = after
            if not self.inside:
                said += before
            elif found := self._calls(before):
                calls += found
            else:
                said += OPEN + before + CLOSE
            self.inside = not self.inside
        if self.inside:
            if ended:  # a tag that was never closed
                found = self._calls(self.held)
                calls, said, self.held = calls + found, said + ("" if found else OPEN + self.held), ""
            return said, calls
        keep = 0 if ended else next((n for n in range(len(OPEN) - 1, 0, -1) if self.held.endswith(OPEN[:n])), 0)
        said, self.held = said + self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return said, calls

    def _calls(self, body: str) -> list[dict[str, Any]]:
        """The calls that a text is; none if it is anything else."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return []
        found = []
        for call in value if isinstance(value, list) else [value]:
            arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            if arguments is None or call.get("name") not in self.tools.names:
                return []
            if self.calls and not self.tools.several:
                break
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": call["name"], "arguments": written}
            found.append({"index": self.calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            self.calls += 1
        return found
