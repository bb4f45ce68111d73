"""The JSON types that a tool's schema allows for a parameter: by type, alternatives, references, constants."""

from collections.abc import Iterator
from typing import Any

ANY: frozenset[str] = frozenset()  # a schema that names no type
NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object"}
MOST = 256  # max. schemas that are read for one parameter; a client's may refer to itself, several times


def types_of(schema: Any, root: Any, numbers: Iterator[int] | None = None) -> frozenset[str]:
    """The names of the types that a schema allows, ANY if it does not say.

    An optional text of pydantic is {"anyOf": [{"type": "string"}, {"type": "null"}]}, its enum {"$ref": "#/$defs/Colour"}.
    root: the schema to which references refer. numbers: of the schemas that are still read.
    """
    numbers = iter(range(MOST)) if numbers is None else numbers
    if not isinstance(schema, dict) or next(numbers, None) is None:
        return ANY
    named = schema.get("type")
    limits = [frozenset(t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str))]
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if isinstance(values, list):
        limits.append(frozenset(NAMES[type(v)] for v in values if type(v) in NAMES))
    if isinstance(reference := schema.get("$ref"), str):
        limits.append(types_of(_referred(reference, root), root, numbers))
    for key in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(key), list):
            each = [types_of(way, root, numbers) for way in ways]
            limits.append(ANY if ANY in each else frozenset().union(*each))
    if isinstance(ways := schema.get("allOf"), list):
        limits += [types_of(way, root, numbers) for way in ways]
    allowed = ANY
    for limit in filter(None, limits):
        allowed = _both(allowed, limit) or allowed if allowed else limit
    return allowed | {"null"} if allowed and schema.get("nullable") is True else allowed


def _both(a: frozenset[str], b: frozenset[str]) -> frozenset[str]:
    """The types that are in both; an integer is a number, too."""
    return a & b | {"integer" for one, other in ((a, b), (b, a)) if "integer" in one and "number" in other}


def _referred(reference: str, root: Any) -> Any:
    """What a reference within the schema, such as #/$defs/Colour, refers to; None if there is nothing."""
    first, *parts = reference.split("/")
    found = root if first == "#" else None
    for part in parts:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def has_type(value: Any, types: frozenset[str]) -> bool:
    """Whether a JSON value is of one of the types."""
    name = NAMES[type(value)]
    return name in types or (name == "integer" and "number" in types)
