"""Gemma's calls: call:NAME{key:value,...} between tags, with special marks around strings."""

import json
from dataclasses import dataclass

from lowq_cli.output.calls import Enclosed
from lowq_cli.output.json_text import converted, escaped
from lowq_cli.output.parts import Parts
from lowq_cli.output.schema_types import ANY
from lowq_cli.output.source import Source, Wait, ignore

DEEPEST = 64  # max. nesting of values; a deeper value is passed on as plain text


@dataclass(frozen=True)
class Braces(Enclosed):
    """The marks around a call. quote: on both sides of a string."""

    quote: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The marks that may be special tokens."""
        return (self.open, self.close, self.quote)

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the first call, and the call."""
        if not (yield from source.until((self.open,), out.text)):
            return
        source.mark()
        yield from source.blanks()
        yield from source.takes("call:")
        name = yield from source.word("{")
        if name is None or not out.call(name.strip()):
            out.text(self.open + source.taken)
            source.sure()
            return
        source.sure()
        yield from self._object(source, out, 0)
        yield from source.until((self.close,), ignore)

    def _object(self, source: Source, out: Parts, depth: int) -> Wait[None]:
        """Read an object after its opening brace, up to the closing one."""
        out.arguments("{")
        between = ""
        while True:
            yield from source.blanks()
            if (yield from source.takes("}")):
                break
            if (yield from source.takes(self.quote)):
                key = yield from source.word(self.quote)
                yield from source.until((":",), ignore)
            else:
                key = yield from source.word(":")
            if key is None:
                break
            out.arguments(between + json.dumps(key.strip().strip('"'), ensure_ascii=False) + ": ")
            between = ", "
            yield from self._value(source, out, depth + 1)
            yield from source.blanks()
            yield from source.takes(",")
        if not source.over or not source.cut:
            out.arguments("}")

    def _list(self, source: Source, out: Parts, depth: int) -> Wait[None]:
        out.arguments("[")
        between = ""
        while True:
            yield from source.blanks()
            if (yield from source.takes("]")) or source.over:
                break
            out.arguments(between)
            between = ", "
            some = yield from self._value(source, out, depth + 1)
            yield from source.blanks()
            if not (yield from source.takes(",")) and not some:
                break  # not a value of a list
        if not source.over or not source.cut:
            out.arguments("]")

    def _value(self, source: Source, out: Parts, depth: int) -> Wait[bool]:
        """Read one value; returns whether there was one."""
        yield from source.blanks()
        if (yield from source.takes(self.quote)):
            out.arguments('"')
            if (yield from source.until((self.quote,), lambda t: out.arguments(escaped(t)))) or not source.cut:
                out.arguments('"')
            return True
        if depth < DEEPEST and (opened := (yield from source.takes("{", "["))):
            yield from (self._object if opened == "{" else self._list)(source, out, depth)
            return True
        pieces: list[str] = []
        end = yield from source.until((",", "}", "]", self.close), pieces.append)
        source.held = end + source.held
        if pieces or end or not source.cut:
            out.arguments(json.dumps(converted("".join(pieces), ANY), ensure_ascii=False))
        return bool(pieces)


GEMMA = Braces("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = Braces("<start_function_call>", "<end_function_call>", "<escape>")
