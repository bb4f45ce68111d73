"""Reads JSON as it streams: single values, calls as objects, and plain text converted to the type of a schema."""

import ast
import json
import re
from typing import Any

from lowq_cli.output.parts import Parts
from lowq_cli.output.schema_types import has_type
from lowq_cli.output.source import LONGEST, Say, Source, Wait

NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
BESIDE = ("id", "type", "index", "tool_call_id", "call_id")  # keys of a call's object that are ignored
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def as_object(text: str) -> dict[str, Any]:
    """The object in a JSON text; {} for other values, and for what is no JSON, such as the arguments of a call that was cut."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def string(source: Source) -> Wait[str | None]:
    """Consume a JSON string of up to LONGEST characters; None if the text goes on with something else."""
    while True:
        match = STRING.match(source.held)
        if match and len(match[0]) <= LONGEST:
            try:
                return str(json.loads(source.take(len(match[0])), strict=False))
            except ValueError:
                return None
        begins = source.held[:1] in ('"', "") and len(source.held) <= LONGEST
        if match or source.ended or not begins:
            return None
        yield


def value(source: Source, say: Say) -> Wait[None]:
    """Pass one JSON value to `say` as it streams; invalid JSON is passed on up to the place where a value would end.

    A < outside of quotes ends it, too: it is no JSON, and begins the closing tag of a call whose braces were not closed.
    """
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
            elif c == "<" or (not depth and (c == "," or c.isspace())):
                end = i
            if end is not None:
                break
        text = source.take(len(source.held) if end is None else end)
        if text:
            say(text)
        if end is not None or source.ended:
            return
        yield


def call_object(source: Source, out: Parts) -> Wait[bool]:
    """Read {"name": ..., "arguments": {...}} as a call and stream its arguments; False if the text is something else."""
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
            pieces: list[str] = []
            yield from (_arguments if key in ARGUMENTS else value)(source, pieces.append)
            early = "".join(pieces) if key in ARGUMENTS else early
        else:
            return False
        yield from source.blanks()
        if (yield from source.takes(",", "}")) != ",":
            break
    begins = not source.held or (source.held[0] == '"' and not STRING.match(source.held))
    if not begun and name and source.ended and source.cut and begins:  # the limit came before the arguments
        source.take(len(source.held))
        begun = out.call(name)
    return begun


def _arguments(source: Source, say: Say) -> Wait[None]:
    """Pass an object to `say` as it streams; an object inside a string is taken out of the string."""
    while not source.held and not source.ended:
        yield
    if source.held.startswith("{"):
        yield from value(source, say)
        return
    pieces: list[str] = []
    yield from value(source, pieces.append)
    text = "".join(pieces)
    if text.startswith('"'):
        try:
            text = str(json.loads(text, strict=False))
        except ValueError:
            text = text[1:]  # the string was cut
    cut = source.cut and source.over  # the limit came before the value's first character, and not after an empty one
    say("{}" if text == "null" or not (text or cut) else text)


def typed(source: Source, out: Parts, key: str, ends: tuple[str, ...], trim: bool) -> Wait[str]:
    """Read a parameter's text up to one of the ends as JSON of its type; returns the end. trim: drop a newline at both ends."""
    types = out.offered.types(out.function, key)
    if types == {"string"}:
        out.arguments('"')
        say: Say = lambda t: out.arguments(escaped(t))  # noqa: E731
        end = yield from source.until(ends, Trimmed(say) if trim else say)
        if end or not source.cut:
            out.arguments('"')
        return end
    pieces: list[str] = []
    end = yield from source.until(ends, pieces.append)
    if end or not source.cut:
        out.arguments(json.dumps(converted("".join(pieces), types), ensure_ascii=False))
    return end


def converted(text: str, types: frozenset[str]) -> Any:
    """The value of a text where other types than strings are allowed (`types_of`): JSON (which has no NaN and no infinity), a
    Python literal, or else the text."""
    plain = text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            value = json.loads(json.dumps(read(plain), allow_nan=False))  # tuples become lists
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if not types or has_type(value, types):
            return value
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            return int(value)
        return value if isinstance(value, str) else text.strip("\n")
    return text.strip("\n")


def escaped(text: str) -> str:
    """A piece of text, escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Trimmed:
    """Passes text to `say` without one newline at its start and one at its end."""

    def __init__(self, say: Say) -> None:
        self.say, self.begun, self.kept = say, False, ""

    def __call__(self, text: str) -> None:
        if not self.begun and text:
            self.begun, text = True, text.removeprefix("\n")
        text = self.kept + text
        self.kept = "\n" if text.endswith("\n") else ""
        if text := text.removesuffix("\n"):
            self.say(text)
