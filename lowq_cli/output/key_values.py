"""GLM's calls, a function's name with a tag around each key and each value; detected by <arg_key>. Also LongCat, Hunyuan 3."""

import json
from dataclasses import dataclass

from lowq_cli.output.calls import Calls
from lowq_cli.output.json_text import typed
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Source, Wait, ignore


@dataclass(frozen=True)
class KeyValues(Calls):
    """The tags. prefix: begins the names of all tags."""

    prefix: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that may be special tokens."""
        names = ("tool_call", "arg_key", "arg_value")
        return tuple(f"<{end}{self.prefix}{name}>" for name in names for end in ("", "/"))

    @property
    def openers(self) -> tuple[str, ...]:
        """The tag that begins a call."""
        return self.tags[:1]

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the first call, and the call."""
        open_, close, key, key_end, value, value_end = self.tags
        if not (yield from source.until((open_,), out.text)):
            return
        source.mark()
        yield from source.blanks()
        ends = ("\n", key, "<tool_sep>", close)
        name = yield from source.word(*ends)
        after = source.taken
        if name is None or not out.call(name.strip()):
            out.text(open_ + source.taken)
            source.sure()
            return
        source.held = next((e for e in ends if after.endswith(e)), "") + source.held
        source.sure()
        out.arguments("{")
        first = True
        while True:
            tag = yield from source.until((key, close), ignore)
            key_text = (yield from source.word(key_end)) if tag == key else None
            if key_text is None:
                break
            out.arguments(("" if first else ", ") + json.dumps(key_text.strip(), ensure_ascii=False) + ": ")
            first = False
            yield from source.until((value,), ignore)
            yield from typed(source, out, key_text.strip(), (value_end,), trim=False)
        if tag or not source.cut:
            out.arguments("}")


GLM, LONGCAT = KeyValues(), KeyValues("longcat_")
