"""The parts of an answer, in the order in which they come."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lowq_cli.output.schema_types import types_of

Kind = Literal["thought", "text", "call", "arguments"]


@dataclass
class Part:
    """A piece of an answer. Kind "call" begins a call, its text is the function's name; "arguments" is a piece of its JSON.

    index: the number of the call in the answer. id: the id of the call, only in its first part.
    """

    kind: Kind
    text: str
    index: int = 0
    id: str = ""


@dataclass(frozen=True)
class Offered:
    """The functions that an answer may call. functions: name -> JSON schema of its parameters. several: allows several calls.

    forced: whether the answer must be a call. only: the function of a forced call, if there is just one.
    """

    functions: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    several: bool = True
    forced: bool = False
    only: str | None = None

    def types(self, function: str, key: str) -> frozenset[str]:
        """The names of the JSON types that a parameter may have, ANY if its schema does not say."""
        schema = self.functions.get(function, {})
        properties = schema.get("properties")
        return types_of(properties.get(key) if isinstance(properties, dict) else None, schema)


class Parts:
    """Collects the parts that are certain, and counts the calls."""

    def __init__(self, offered: Offered) -> None:
        self.offered, self.calls = offered, 0
        self.function = ""  # name in the call that is being written
        self._found: list[Part] = []
        self.thinking = False  # whether thoughts are being written
        self._surplus = self.mute = False  # mute: text is dropped
        self._blank = ""  # white space that was read and may precede a call

    def take(self) -> list[Part]:
        """The parts added since the last call."""
        parts, self._found = self._found, []
        return parts

    def thought(self, text: str) -> None:
        """Add text to the thoughts."""
        self.flush()
        self._add("thought", text)

    def text(self, text: str) -> None:
        """Add text to the answer. White space at its end is kept back: before a call it is the template's, not the answer's."""
        if self.mute:
            return
        text = self._blank + text
        seen = text.rstrip() if self.offered.functions else text
        self._blank = text[len(seen) :]
        self._add("text", seen)

    def flush(self) -> None:
        """Add the white space that was kept back."""
        if not self.mute:
            self._add("text", self._blank)
        self._blank = ""

    def end(self) -> None:
        """The answer has ended: white space after its calls is dropped."""
        if self.calls:
            self._blank = ""
        self.flush()

    def call(self, name: str, id_: str = "") -> bool:
        """Begin a call; returns False if the function is not offered. If only one call is allowed, further ones are dropped."""
        if name not in self.offered.functions:
            return False
        self._blank = ""
        self.function, self._surplus = name, bool(self.calls) and not self.offered.several
        if not self._surplus:
            self._found.append(Part("call", name, self.calls, id_ or f"call_{uuid.uuid4().hex[:24]}"))
            self.calls += 1
        return True

    def arguments(self, text: str) -> None:
        """Add a piece of JSON to the last call."""
        if not self._surplus:
            self._add("arguments", text, self.calls - 1)

    def _add(self, kind: Kind, text: str, index: int = 0) -> None:
        last = self._found[-1] if self._found else None
        if last is not None and last.kind == kind and last.index == index:
            last.text += text
        elif text:
            self._found.append(Part(kind, text, index))


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbours of the same kind and call merged."""
    parts_so_far: list[Part] = []
    for p in parts:
        if parts_so_far and p.kind != "call" and (parts_so_far[-1].kind, parts_so_far[-1].index) == (p.kind, p.index):
            parts_so_far[-1].text += p.text
        else:
            parts_so_far.append(Part(p.kind, p.text, p.index, p.id))
    return parts_so_far
