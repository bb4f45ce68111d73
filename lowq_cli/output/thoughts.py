"""The section in which a model thinks before it answers."""

from collections.abc import Container
from dataclasses import dataclass

from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Say, Source, Wait


@dataclass(frozen=True)
class Thoughts:
    """How a family marks its thoughts. after: what it writes between them and its answer."""

    open: str
    close: str
    after: str = "\n\n"

    @property
    def end(self) -> str:
        """What ends thoughts that go on."""
        return f"\n{self.close}{self.after}"

    @property
    def none(self) -> str:
        """An empty section."""
        return f"{self.open}\n{self.end}"

    def opened(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins in the midst of thoughts."""
        return prompt.rstrip().endswith(self.open.rstrip())

    def read(self, source: Source, out: Parts, inside: bool, openers: tuple[str, ...]) -> Wait[None]:
        """Take the thoughts that the text begins with, if any. openers: of calls, which end thoughts that nothing closed."""
        if not inside:
            source.mark()
            yield from source.blanks()
            tag = yield from source.takes(self.open, self.close)
            if not tag:
                source.back()
                return
            source.sure()
            if tag == self.close:  # of thoughts that the template left out
                yield from source.blanks()
                return
        out.thinking = True
        yield from source.blanks()
        tag = yield from source.until((self.close, *openers), _Unblanked(out.thought))
        out.thinking = False
        if tag == self.close:
            yield from source.blanks()
        else:
            source.held = tag + source.held


class _Unblanked:
    """Says a text without the blanks at its end."""

    def __init__(self, say: Say) -> None:
        self.say, self.kept = say, ""

    def __call__(self, text: str) -> None:
        text = self.kept + text
        self.kept = text[len(text.rstrip()) :]
        if text := text.rstrip():
            self.say(text)


SECTIONS = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Thoughts("<|channel>thought", "<channel|>", ""),  # Gemma 4: a token and a word
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Thoughts("<seed:think>", "</seed:think>"),
    Thoughts("<mm:think>", "</mm:think>"),  # MiniMax M3
    Thoughts("◁think▷", "◁/think▷"),  # Kimi-VL
)


def section_of(template: str, added: Container[str]) -> Thoughts | None:
    """The section of a model, found in its chat template, or among the tokens that were added to its vocabulary."""
    written = next((s for s in SECTIONS if s.open in template or s.close in template), None)
    return written or next((s for s in SECTIONS if s.open in added and s.close in added), None)
