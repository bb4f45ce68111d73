"""Calls as JSON between tags, one or a list: Hermes, Qwen 2.5 and 3, Granite, EXAONE, Ernie, Hunyuan, Nemotron, Command."""

from dataclasses import dataclass

from lowq_cli.output.calls import Enclosed
from lowq_cli.output.json_text import call_object
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import OBJECT, Source, Wait, ignore


@dataclass(frozen=True)
class TaggedJson(Enclosed):
    """The tags. close: "" if the JSON's end is the end of a call."""

    @property
    def form(self) -> tuple[str, ...]:
        """The pieces of a call (`Calls.form`)."""
        return (self.open, "\n", OBJECT, "\n", self.close) if self.open in ("<tool_call>", "<tool_calls>") else ()

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the first calls, and the calls."""
        if not (yield from source.until((self.open,), out.text)):
            return
        source.mark()
        yield from source.blanks()
        yield from source.takes("[")
        any_call = False
        while True:
            yield from source.blanks()
            if not (yield from call_object(source, out)):
                break
            any_call = True
            source.sure()
            yield from source.blanks()
            if not (yield from source.takes(",")):
                break
        if not any_call:
            out.text(self.open + source.taken)
            source.sure()
        elif self.close:
            tag = yield from source.until((self.close, self.open), ignore)
            if tag == self.open:  # the previous call was never closed
                source.held = tag + source.held
        else:
            yield from source.takes("]")


HERMES = TaggedJson("<tool_call>", "</tool_call>")
KINDS = (
    TaggedJson("<tool_calls>", "</tool_calls>"),  # Hunyuan
    TaggedJson("<TOOLCALL>", "</TOOLCALL>"),  # Nemotron
    TaggedJson("<|tool_call|>", "</|tool_call|>"),  # Granite 3, which ends a call with the end of the text
    TaggedJson("<|START_ACTION|>", "<|END_ACTION|>"),  # Command
    TaggedJson("<|action_start|><|plugin|>", "<|action_end|>"),  # InternLM
    TaggedJson("functools", ""),  # Phi 4 mini
    HERMES,
)
