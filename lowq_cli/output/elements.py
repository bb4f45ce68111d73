"""Calls with one element per argument, typed by the tool's schema: Qwen 3 Coder, Seed, MiniMax, DeepSeek 3.2."""

import json
from dataclasses import dataclass

from lowq_cli.output.calls import Calls
from lowq_cli.output.json_text import typed
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Source, Wait, ignore


@dataclass(frozen=True)
class Elements(Calls):
    """The tags. section: around all calls. call, name_end: around a function's name. key, key_ends: around a key."""

    section: str
    section_end: str
    call: str
    call_end: str
    key: str
    value_end: str
    name_end: str = ">"
    key_ends: tuple[str, ...] = (">",)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that may be special tokens."""
        return (self.section, self.section_end)

    @property
    def openers(self) -> tuple[str, ...]:
        """The tags that begin a call; models sometimes omit the section's tag."""
        return (self.section, self.call)

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the first calls, and the calls."""
        tag = yield from source.opening(self.openers, self.section, self.call, out.text)
        if not tag:
            return
        while True:
            name = yield from source.word(self.name_end)
            if name is None or not out.call(name.strip()):
                out.text(tag + source.taken)
                source.sure()
                return
            yield from self._arguments(source, out)
            source.mark()
            yield from source.blanks()
            tag = yield from source.takes(self.call)
            if not tag:
                break
        if (yield from source.takes(self.section_end)):
            source.sure()
        else:
            source.back()

    def _arguments(self, source: Source, out: Parts) -> Wait[None]:
        source.sure()
        out.arguments("{")
        first = True
        while True:
            tag = yield from source.until((self.key, self.call_end, self.section_end), ignore)
            name = (yield from source.word(*self.key_ends)) if tag == self.key else None
            if name is None:
                break
            out.arguments(("" if first else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
            first = False
            yield from typed(source, out, name, (self.value_end,), trim=True)
        if tag == self.section_end:
            source.held = tag + source.held
        if tag or not source.cut:
            out.arguments("}")


QWEN = Elements("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
SEED = Elements("<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")
MINIMAX = Elements(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', "</parameter>",
    name_end='">', key_ends=('">',),
)  # fmt: skip
D = "｜DSML｜"
DEEPSEEK = Elements(
    f"<{D}function_calls>", f"</{D}function_calls>", f'<{D}invoke name="', f"</{D}invoke>",
    f'<{D}parameter name="', f"</{D}parameter>", name_end='">', key_ends=('" string="true">', '" string="false">', '">'),
)  # fmt: skip
