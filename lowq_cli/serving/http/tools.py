"""Tool calls: the tools that a request offers, and the grammars that force a call or a form of the answer."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lowq_cli.engine.tokenizer import Added
from lowq_cli.output.parts import Offered
from lowq_cli.output.source import ARGUMENTS, NAME, OBJECT
from lowq_cli.output.syntaxes import Syntax
from lowq_cli.output.thoughts import Thoughts
from lowq_cli.serving.http.fields import Params, shown, table, text
from lowq_cli.serving.http.grammar import SPACED, Form, Grammars, answer_form
from lowq_cli.serving.http.refusal import wrong
from lowq_cli.serving.request import Mask

FUNCTION = re.compile(r"[\w.-]{1,64}")
NOTHING = {"type": "object", "properties": {}}  # the schema of a function without parameters
ANYTHING = "/(?s:.*)/"


@dataclass(frozen=True)
class Tools:
    """The functions that a request offers. choice: "none", "auto", "required" or a function's name.

    deferred: further ones that may be called, but are described in the conversation instead of with the others.
    """

    given: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "none"
    several: bool = True
    deferred: list[dict[str, Any]] = field(default_factory=list)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice not in ("none", "auto")

    @property
    def offered(self) -> Offered:
        """The offered functions for the reader of answers."""
        functions = {t["function"]["name"]: t["function"]["parameters"] for t in (*self.given, *self.deferred)}
        named = [self.choice] if self.choice != "required" else list(functions)
        return Offered(functions, self.several, self.forced, named[0] if self.forced and len(named) == 1 else None)


def read(params: Params) -> Tools:
    """The tools of a body and the choice among them. Raises Refusal."""
    each = [(_tool(f"tools[{i}]", t), t.get("defer_loading") is True) for i, t in enumerate(params.get("tools", []))]
    given, deferred = ([tool for tool, later in each if later is which] for which in (False, True))
    choice = params.get("tool_choice", "auto" if given else "none")
    if isinstance(choice, dict):
        choice = text("tool_choice.function.name", table("tool_choice.function", choice.get("function")).get("name"))
        if choice not in [t["function"]["name"] for t in given]:
            raise wrong("tool_choice", f"{shown(choice)} is not one of the tools")
    elif choice not in ("none", "auto", "required"):
        raise wrong("tool_choice", f"must be none, auto, required or one of the tools, not {shown(choice)}")
    elif choice == "required" and not given:
        raise wrong("tool_choice", "required needs tools to choose from; there are none")
    choice = choice if given else "none"
    if choice == "none":
        given = deferred = []
    return Tools(given, choice, params.get("parallel_tool_calls", True), deferred)


def _tool(name: str, given: Any) -> dict[str, Any]:
    if table(name, given).get("type") != "function":
        raise wrong(f"{name}.type", f"must be function, not {shown(given.get('type'))}")
    function = table(f"{name}.function", given.get("function"))
    if not FUNCTION.fullmatch(text(f"{name}.function.name", function.get("name"))):
        raise wrong(f"{name}.function.name", "must be up to 64 letters, digits, and . _ -")
    parameters = function.get("parameters")
    # NOTHING: templates read `parameters`, which clients leave out of a function without any
    parameters = NOTHING if parameters is None else table(f"{name}.function.parameters", parameters)
    return {"type": "function", "function": {**function, "parameters": parameters}}


@dataclass(frozen=True)
class Place:
    """The state at which an answer begins. syntax: the model's. inside: whether it begins inside thoughts. think: whether
    it may have thoughts. template: the chat template. added: tokens that were added to the vocabulary."""

    syntax: Syntax
    template: str
    added: Mapping[str, Added]
    inside: bool = False
    think: bool | None = None


def form(params: Params, tools: Tools, place: Place, grammars: Grammars) -> Callable[[], Mask] | None:
    """A function that makes the masks for the requested form of an answer; None if any text is allowed.

    A forced call has the model's own syntax. If calls are optional and the answer has a form, the grammar allows either a call
    or an answer in the form. Thoughts may precede both. Raises Refusal for a form together with a forced call.
    """
    answer_mask = answer_form(params)
    if tools.forced and answer_mask is not None:
        raise wrong(
            "response_format", "says how an answer in text looks, and tool_choice forces a call of a tool; leave one out"
        )
    thoughts = None if place.think is False and not place.inside else place.syntax.thoughts
    if answer_mask is None and not tools.forced:
        return None
    if not tools.given and answer_mask is not None and thoughts is None and answer_mask.schema is not None:
        return grammars.schema(answer_mask.schema, answer_mask.param)
    if params.get("ignore_eos"):
        raise wrong("ignore_eos", "an answer in a form ends where the form does; leave one out")
    return grammars.lark(
        lambda added: _grammar(tools, replace(place, added=added), answer_mask, thoughts),
        place.added,
        answer_mask.param if answer_mask else "tools",
    )


def _grammar(tools: Tools, place: Place, answer: Form | None, thoughts: Thoughts | None) -> str:
    """The grammar of an answer in Lark's format."""
    rules, begun, ends = [], "", []
    if thoughts is not None:
        begun = "thoughts " if place.inside else "thoughts? "
        rules.append(_thoughts(thoughts, place))
    if tools.given:
        ends.append("call")
        rules.append(_call(tools, place))
    if answer is not None:
        ends.append("answer")
        rules.append(f"answer: {answer.rule}\n")
    return f"start: {begun}({' | '.join(ends)})\n" + "".join(rules)


def _thoughts(thoughts: Thoughts, place: Place) -> str:
    """The rule for thoughts, up to the start of the answer."""
    head = "" if place.inside else f"{_literal(thoughts.open, place.added)} "
    after = f" {json.dumps(thoughts.after)}?" if thoughts.after else ""
    if thoughts.close in place.added:
        return f"thoughts: {head}{ANYTHING} {_literal(thoughts.close, place.added)}{after}\n"
    return f"thoughts: {head}thinking{after}\nthinking[suffix={json.dumps(thoughts.close)}]: {ANYTHING}\n"


def _literal(text: str, added: Mapping[str, Added]) -> str:
    """A literal of a rule; added tokens in it are written as tokens, because ordinary text never makes them."""
    added_text = next((t for t in added if t and text.startswith(t)), None) if text not in added else text
    if added_text is None:
        return json.dumps(text, ensure_ascii=False)
    rest = text.removeprefix(added_text)
    return f"<[{added[added_text].token}]>" + (f" {_literal(rest, added)}" if rest else "")


def _call(tools: Tools, place: Place) -> str:
    """The rules for a call of one of the allowed tools, in the model's own syntax or as JSON."""
    functions = [t["function"] for t in tools.given if tools.choice in ("auto", "required", t["function"]["name"])]
    written = place.syntax.calls.form if place.syntax.calls else ()
    if not all(part in place.template or part in place.added for part in written if part.strip() and part[0] in "<["):
        written = ()
    if OBJECT in written or not written:
        whole = " ".join("object" if p == OBJECT else _literal(p, place.added) for p in written if p) or "object"
        key = "parameters" if place.syntax.calls is None and '"parameters"' in place.template else "arguments"
        return f"call: {whole}\nobject: %json {json.dumps(_objects(functions, key))}\n"
    rules = []
    for i, f in enumerate(functions):
        parts = {NAME: json.dumps(f["name"]), ARGUMENTS: f"arguments{i}"}
        rules.append(f"call{i}: " + " ".join(parts.get(p) or _literal(p, place.added) for p in written if p))
        rules.append(f"arguments{i}: %json {json.dumps({**(f.get('parameters') or {'type': 'object'}), 'x-guidance': SPACED})}")
    return "call: " + " | ".join(f"call{i}" for i in range(len(functions))) + "\n" + "\n".join(rules) + "\n"


def _objects(functions: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The schema of a call as an object with a name and arguments."""
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
        for i, f in enumerate(functions)
    ]
    return {"anyOf": calls, "x-guidance": SPACED}


def _moved(schema: Any, place: str) -> Any:
    """A schema that is nested in a larger one at a given path: its references are rewritten to that path."""
    if isinstance(schema, list):
        return [_moved(s, place) for s in schema]
    if not isinstance(schema, dict):
        return schema
    at = schema.get("$ref")
    moved = {k: _moved(v, place) for k, v in schema.items()}
    return moved | {"$ref": place + at[1:]} if isinstance(at, str) and at.startswith("#") else moved
