"""Calls as a head with the function's name, a mark, and JSON: DeepSeek 3 and R1, Kimi K2, Mistral."""

from dataclasses import dataclass

from lowq_cli.output import bare_json
from lowq_cli.output.json_text import value
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import ARGUMENTS, NAME, Source, Wait, ignore


@dataclass(frozen=True)
class Headed:
    """The marks. section, section_end: around all calls, or "". call: before a head. mark: after it. end: after a call, or "".

    named: whether the head is functions.NAME:INDEX, which is also the call's id (Kimi).
    """

    section: str
    call: str
    mark: str
    end: str = ""
    section_end: str = ""
    named: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """The marks that may be special tokens."""
        return tuple(filter(None, (self.section, self.call, self.mark, self.end, self.section_end)))

    @property
    def form(self) -> tuple[str, ...]:
        """The pieces of a call (`Calls.form`)."""
        name = ("functions.", NAME, ":0") if self.named else (NAME,)
        return (self.section, self.call, *name, self.mark, ARGUMENTS, self.end, self.section_end)

    @property
    def openers(self) -> tuple[str, ...]:
        """The marks that begin a call."""
        return tuple(filter(None, (self.section, self.call)))

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Read text up to the first calls, and the calls."""
        tag = yield from source.opening(self.openers, self.section, self.call, out.text)
        if not tag:
            return
        while True:
            yield from source.blanks()
            if source.held[:1] in ("[", "{"):  # older Mistral models: JSON without a head
                if not (yield from bare_json.read(source, out)):
                    out.text(tag)
                return
            name, id_ = yield from self._head(source, out)
            if name is None or not out.call(name, id_):
                out.text(tag + source.taken)
                source.sure()
                return
            source.sure()
            yield from source.until(("{",), ignore)  # DeepSeek puts the JSON into a Markdown fence
            source.held = "{" + source.held if not source.over else source.held
            yield from value(source, out.arguments)
            if self.end:
                yield from source.until((self.end, self.section_end), ignore)
            source.mark()
            yield from source.blanks()
            if not (yield from source.takes(self.call)):
                break
        source.back()
        if self.section_end:
            yield from source.blanks()
            yield from source.takes(self.section_end)

    def _head(self, source: Source, out: Parts) -> Wait[tuple[str | None, str]]:
        """(the function's name, the call's id); the name is None if the text is not a head."""
        head = (yield from source.word(self.mark)) or ""
        if self.named:
            return head.strip().removeprefix("functions.").rpartition(":")[0] or None, head.strip()
        if (
            head.strip() == "function" and head.strip() not in out.offered.functions
        ):  # DeepSeek 3: the word "function", then the name
            head = (yield from source.word("\n")) or ""
        return head.partition("[CALL_ID]")[0].strip() or None, ""


DEEPSEEK = Headed(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
KIMI = Headed(
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", named=True,
)  # fmt: skip
MISTRAL = Headed("", "[TOOL_CALLS]", "[ARGS]")
