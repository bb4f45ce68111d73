"""Calls in Python's syntax, [f(a=1), g(b="x")]: Llama 4 and Gemma 3, and between tags LFM 2 and OLMo 3."""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from lowq_cli.output.calls import Enclosed
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import LONGEST, Source, Wait, ignore

WORDS = {"true": True, "false": False, "null": None}  # JSON's words that Python writes differently
HEAD = re.compile(r"[A-Za-z_][\w.-]*\s*\(")


@dataclass(frozen=True)
class PythonCalls(Enclosed):
    """The marks around the calls; "" if an answer begins with the calls."""

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the first calls, and the calls."""
        if self.open and not (yield from source.until((self.open,), out.text)):
            return
        source.mark()
        yield from source.blanks()
        listed = yield from source.takes("[")
        any_call = False
        while self.open or listed:
            yield from source.blanks()
            if not (yield from self._call(source, out)):
                break
            any_call = True
            source.sure()
            yield from source.blanks()
            yield from source.takes(",")
        if not any_call:
            out.text(self.open + source.taken)
            source.sure()
            if not self.open:  # calls can only be at the start
                yield from source.until((), out.text)
            return
        yield from source.takes("]")
        if self.close:
            yield from source.until((self.close,), ignore)
        else:
            yield from source.blanks()
            yield from source.until((), out.text)

    @staticmethod
    def _call(source: Source, out: Parts) -> Wait[bool]:
        """Read one call; its arguments are passed on once they are complete."""
        while not (head := HEAD.match(source.held)):
            if (
                source.ended
                or len(source.held) > LONGEST
                or (source.held and not re.fullmatch(r"[A-Za-z_][\w.-]*\s*", source.held))
            ):
                return False
            yield
        name = head[0][:-1].strip()
        if name not in out.offered.functions:
            return False
        source.sure()
        out.call(name)
        source.take(len(head[0]))
        text = yield from _to_the_end(source)
        if text is not None:
            out.arguments(_as_json(text))
        return True


def _to_the_end(source: Source) -> Wait[str | None]:
    """Consume the arguments up to the closing bracket, and the bracket, and return them; None if there is no bracket."""
    at, depth, quote = 0, 0, ""
    while True:
        while at < len(source.held):
            c = source.held[at]
            if quote:
                if c == "\\":
                    at += 1
                elif c == quote:
                    quote = ""
            elif c in "'\"":
                quote = c
            elif c in "([{":
                depth += 1
            elif c in ")]}" and depth:
                depth -= 1
            elif c == ")":
                text = source.take(at)
                source.take(1)
                return text
            at += 1
        if source.ended:
            source.take(len(source.held))
            return None
        yield


def _as_json(text: str) -> str:
    """Named arguments as a JSON object; a value that is not a literal becomes a string of its source."""
    arguments: dict[str, Any] = {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return json.dumps({"": text}, ensure_ascii=False)
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        try:
            arguments[keyword.arg or ""] = ast.literal_eval(_Words().visit(keyword.value))
            json.dumps(arguments, allow_nan=False)
        except (ValueError, TypeError, RecursionError, MemoryError):
            arguments[keyword.arg or ""] = ast.unparse(keyword.value)
    return json.dumps(arguments, ensure_ascii=False)


class _Words(ast.NodeTransformer):
    """Replaces true, false and null by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


LFM = PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")
OLMO = PythonCalls("<function_calls>", "</function_calls>")
LLAMA4 = PythonCalls()
