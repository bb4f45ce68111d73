"""Calls of tools: what a request offers, how a model is made to call one, and calls read out of its text.

A model writes a call as its chat template taught it: as {"name": ..., "arguments": ...} between <tool_call> tags (Hermes,
Qwen), or as that object alone or in an array, where the answer begins with it (Llama, whose word is "parameters"; Mistral).
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowq_cli.engine.tokenizer import Added
from lowq_cli.serving.http.fields import Asked, shown, table, text
from lowq_cli.serving.http.grammar import SPACED, Grammars, answer_schema
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.request import Mask

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[\w.-]{1,64}")
BEGUN = re.compile(  # a call that may end anywhere after its name
    r'\s*\[?\s*\{\s*"name"\s*:\s*"(?P<name>[\w.-]{1,64})"(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>.*))?',
    re.DOTALL,
)


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
    def only(self) -> str | None:
        """The one function that a forced call can be of, if there is but one."""
        named = [self.choice] if self.choice != "required" else self.names
        return named[0] if self.forced and len(named) == 1 else None

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


def form(
    asked: Asked, tools: Tools, template: str, added: Mapping[str, Added], grammars: Grammars
) -> Callable[[], Mask] | None:
    """What makes masks under which the answer has the form that was asked for; None where it may be any text.

    A forced call is written as the template has calls. Where calls are free and the rest has a form, both are open: a call, or
    an answer in the form. Raises Refusal for a form that a forced call cannot have.
    """
    wanted = answer_schema(asked)
    if tools.forced and wanted is not None:
        raise wrong(
            "response_format", "says how an answer in text looks, and tool_choice forces a call of a tool; leave one out"
        )
    if not tools.given or (wanted is None and not tools.forced):
        return None if wanted is None else grammars.schema(wanted[0], wanted[1])
    if asked.get("ignore_eos"):
        raise wrong("ignore_eos", "an answer in a form ends where the form does; leave one out")
    offered = [t["function"] for t in tools.given if tools.choice in ("auto", "required", t["function"]["name"])]
    key = "parameters" if OPEN not in template and '"parameters"' in template else "arguments"
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": f["name"]},
                key: _moved(f.get("parameters") or {"type": "object"}, f"#/anyOf/{i}/properties/{key}"),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, f in enumerate(offered)
    ]
    spaced = {"anyOf": calls, "x-guidance": SPACED}
    call = f"call: %json {json.dumps(spaced)}\n"
    if OPEN in template:
        opened, closed = (f"<[{added[t].token}]>" if t in added else f'"{t}"' for t in (OPEN, CLOSE))  # no text makes a token
        call = f'call: {opened} "\\n" object "\\n" {closed}\nobject: %json {json.dumps(spaced)}\n'
    if wanted is None:
        return grammars.lark(f"start: call\n{call}", "tools")
    return grammars.lark(
        f"start: call | answer\n{call}answer: %json {json.dumps({**wanted[0], 'x-guidance': SPACED})}\n", wanted[1]
    )


def _moved(schema: Any, place: str) -> Any:
    """A schema that has become part of another, at a place there: what its references mean moves along."""
    if isinstance(schema, list):
        return [_moved(s, place) for s in schema]
    if not isinstance(schema, dict):
        return schema
    at = schema.get("$ref")
    moved = {k: _moved(v, place) for k, v in schema.items()}
    return moved | {"$ref": place + at[1:]} if isinstance(at, str) and at.startswith("#") else moved


class Reader:
    """Text of one answer in; text without the calls, and the calls, out."""

    def __init__(self, tools: Tools) -> None:
        self.tools, self.held, self.calls = tools, "", 0
        self.inside = self.begun = self.bare = False

    def push(self, piece: str, ended: bool, cut: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """(text, calls) that are certain now. cut: whether the answer was ended, in the midst of a call perhaps."""
        self.held += piece
        if not self.begun and (first := self.held.lstrip()[:1]):
            self.begun, self.bare = True, first in "{["
        if self.bare:  # JSON from its first character on: a call, or an answer that is JSON, as its end will show
            if not ended:
                return "", []
            text, self.held = self.held, ""
            found = self._calls(text) or (self._begun(text) if cut else [])
            return ("", found) if found or (cut and self.tools.forced) else (text, [])
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
                found = self._calls(self.held) or (self._begun(self.held) if cut else [])
                hidden = found or (cut and self.tools.forced)
                calls, said, self.held = calls + found, said + ("" if hidden else OPEN + self.held), ""
            return said, calls
        if cut and self.tools.forced and self.held and OPEN.startswith(self.held):
            return said, calls + self._begun("")
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
            found.append(self._call(call["name"], written))
        return found

    def _begun(self, body: str) -> list[dict[str, Any]]:
        """The call that a text is the beginning of, its arguments as far as they came, as OpenAI has it."""
        begun = BEGUN.match(body)
        name = begun["name"] if begun else self.tools.only
        if name not in self.tools.names or (self.calls and not self.tools.several):
            return []
        return [self._call(name, (begun["arguments"] or "") if begun else "")]

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        found = {"index": self.calls, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self.calls += 1
        return found
