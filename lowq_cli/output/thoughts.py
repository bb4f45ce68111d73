"""The section in which a model thinks before it answers."""

from collections.abc import Container
from dataclasses import dataclass

from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Say, Source, Wait


@dataclass(frozen=True)
class Thoughts:
    """The marks of a model family around thoughts. after: the text between the closing mark and the answer."""

    open: str
    close: str
    after: str = "\n\n"

    @property
    def end(self) -> str:
        """The text that ends open thoughts."""
        return f"\n{self.close}{self.after}"

    @property
    def none(self) -> str:
        """The text of an empty section."""
        return f"{self.open}\n{self.end}"

    def opened(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside thoughts."""
        return prompt.rstrip().endswith(self.open.rstrip())

    def read(self, source: Source, out: Parts, inside: bool, openers: tuple[str, ...]) -> Wait[None]:
        """Read thoughts at the start of the text, if any. openers: marks of calls, which end thoughts that are not closed."""
        if not inside:
            source.mark()
            yield from source.blanks()
            tag = yield from source.takes(self.open, self.close)
            if not tag:
                source.back()
                return
            source.sure()
            if tag == self.close:  # a close without an open: the template has left the thoughts out
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
    """Passes text to `say` without whitespace at its end."""

    def __init__(self, say: Say) -> None:
        self.say, self.kept = say, ""

    def __call__(self, text: str) -> None:
        text = self.kept + text
        self.kept = text[len(text.rstrip()) :]
        if text := text.rstrip():
            self.say(text)


THOUGHT_MARKS = (
    Thoughts("<think>", "</think>"),
    Thoughts("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Thoughts("<|channel>thought", "<channel|>", ""),  # Gemma 4: a special token and a word
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Thoughts("<seed:think>", "</seed:think>"),
    Thoughts("<mm:think>", "</mm:think>"),  # MiniMax M3
    Thoughts("◁think▷", "◁/think▷"),  # Kimi-VL
)


def thought_marks_of(template: str, added: Container[str]) -> Thoughts | None:
    """The marks of a model's thoughts, found in its chat template or else among the tokens added to its vocabulary."""
    written = next((s for s in THOUGHT_MARKS if s.open in template or s.close in template), None)
    return written or next((s for s in THOUGHT_MARKS if s.open in added and s.close in added), None)
