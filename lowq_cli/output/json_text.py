"""JSON as it is being written: a value passed on as it comes, a call as an object, values as texts of a schema's type."""

import ast
import json
import re
from typing import Any

from lowq_cli.output.parts import Parts
from lowq_cli.output.source import LONGEST, Say, Source, Wait

NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
BESIDE = ("id", "type", "index", "tool_call_id", "call_id")  # of a call's object, of no use here
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def string(source: Source) -> Wait[str | None]:
    """Take a short JSON string; None where the text goes on with something else."""
    while True:
        found = STRING.match(source.held)
        if found and len(found[0]) <= LONGEST:
            try:
                return str(json.loads(source.take(len(found[0])), strict=False))
            except ValueError:
                return None
        begins = source.held[:1] in ('"', "") and len(source.held) <= LONGEST
        if found or source.ended or not begins:
            return None
        yield


def value(source: Source, say: Say) -> Wait[None]:
    """Say one JSON value as it comes; what is no JSON is said up to where a value would end."""
    depth, quoted, escaped = 0, False, False
    while True:
        end = None
        for i, c in enumerate(source.held):
            if escaped:
                escaped = False
            elif quoted:
                escaped, quoted = c == "\\", c != '"'
                end = i + 1 if not quoted and not depth else None
            elif c == '"':
                quoted = True
            elif c in "{[":
                depth += 1
            elif c in "}]":
                end = i if not depth else i + 1 if depth == 1 else None
                depth -= 1
            elif not depth and (c == "," or c.isspace()):
                end = i
            if end is not None:
                break
        said = source.take(len(source.held) if end is None else end)
        if said:
            say(said)
        if end is not None or source.ended:
            return
        yield


def call_object(source: Source, out: Parts) -> Wait[bool]:
    """Take {"name": ..., "arguments": {...}} as a call, its arguments as they come; False where the text is something else."""
    name, early, begun = "", "", False
    if not (yield from source.takes("{")):
        return False
    while True:
        yield from source.blanks()
        key = yield from string(source)
        yield from source.blanks()
        if key is None or not (yield from source.takes(":")):
            break
        yield from source.blanks()
        if key in NAMES and not begun:
            name = (yield from string(source)) or ""
            if name not in out.offered.functions:
                return False
            if early:
                begun = out.call(name)
                out.arguments(early)
        elif key in ARGUMENTS and name and not begun:
            source.sure()
            begun = out.call(name)
            yield from _arguments(source, out.arguments)
        elif key in ARGUMENTS or key in BESIDE or begun:
            kept: list[str] = []
            yield from (_arguments if key in ARGUMENTS else value)(source, kept.append)
            early = "".join(kept) if key in ARGUMENTS else early
        else:
            return False
        yield from source.blanks()
        if (yield from source.takes(",", "}")) != ",":
            break
    begins = not source.held or (source.held[0] == '"' and not STRING.match(source.held))
    if not begun and name and source.ended and source.cut and begins:  # the call was cut before its arguments
        source.take(len(source.held))
        begun = out.call(name)
    return begun


def _arguments(source: Source, say: Say) -> Wait[None]:
    """An object as it comes; one that is written into a string, out of it."""
    while not source.held and not source.ended:
        yield
    if source.held.startswith("{"):
        yield from value(source, say)
        return
    kept: list[str] = []
    yield from value(source, kept.append)
    text = "".join(kept)
    if text.startswith('"'):
        try:
            text = str(json.loads(text, strict=False))
        except ValueError:
            text = text[1:]  # it was cut
    say("{}" if text == "null" or not (text or source.cut) else text)


def typed(source: Source, out: Parts, key: str, ends: tuple[str, ...], trim: bool) -> Wait[str]:
    """A parameter's text up to one of the ends as JSON of its type; the end. trim: without a newline at both its ends."""
    schema = out.offered.schema(out.function, key)
    if _is_text(schema):
        out.arguments('"')
        say: Say = lambda t: out.arguments(escaped(t))  # noqa: E731
        end = yield from source.until(ends, Trimmed(say) if trim else say)
        if end or not source.cut:
            out.arguments('"')
        return end
    kept: list[str] = []
    end = yield from source.until(ends, kept.append)
    if end or not source.cut:
        out.arguments(json.dumps(converted("".join(kept), schema), ensure_ascii=False))
    return end


def converted(text: str, schema: dict[str, Any]) -> Any:
    """The value that a text means where a schema may want more than texts: JSON, or as Python writes it; else the text."""
    plain = text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(plain)
            json.dumps(found)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        kinds = _kinds(schema)
        if not kinds or any(isinstance(found, TYPES[k]) for k in kinds if k in TYPES):
            return found
        return found if isinstance(found, str) else text.strip("\n")
    return text.strip("\n")


def _kinds(schema: dict[str, Any]) -> tuple[str, ...]:
    given = schema.get("type", ())
    return (
        (given,) if isinstance(given, str) else tuple(k for k in given if isinstance(k, str)) if isinstance(given, list) else ()
    )


def _is_text(schema: dict[str, Any]) -> bool:
    """Whether a parameter can be nothing but a text, as far as its schema says."""
    kinds = _kinds(schema)
    if not kinds:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        return not (set(schema) & {"anyOf", "oneOf", "allOf", "$ref"}) and (
            values is None or all(isinstance(v, str) for v in values)
        )
    return kinds == ("string",)


def escaped(text: str) -> str:
    """A piece of a text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Trimmed:
    """Says a text without the newline at its beginning and the one at its end."""

    def __init__(self, say: Say) -> None:
        self.say, self.begun, self.kept = say, False, ""

    def __call__(self, text: str) -> None:
        if not self.begun and text:
            self.begun, text = True, text.removeprefix("\n")
        text = self.kept + text
        self.kept = "\n" if text.endswith("\n") else ""
        if text := text.removesuffix("\n"):
            self.say(text)
