"""Which way of writing calls and thoughts a model has: read off its chat template, the most particular marks first."""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

from lowq_cli.output import bare_json, braces, elements, harmony, headed_json, pairs, python_calls, tagged_json
from lowq_cli.output.parts import Parts
from lowq_cli.output.source import Source, Wait
from lowq_cli.output.thoughts import SECTIONS, Thoughts, section_of


class Calls(Protocol):
    """One way of writing calls.

    form: how one is written out, texts with NAME and ARGUMENTS or the whole OBJECT of both in their places; () where that is no
    form for a grammar: then calls that are forced come as JSON with nothing around it, which is read with every way.
    """

    @property
    def form(self) -> tuple[str, ...]: ...

    @property
    def tags(self) -> tuple[str, ...]:
        """What may be tokens of their own, which decoding would leave out."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """What begins a call."""
        ...

    def read(self, source: Source, out: Parts) -> Wait[None]:
        """Text up to calls, and those; at least one character of what there is."""
        ...


@dataclass(frozen=True)
class Ways:
    """How a model writes. calls: None for JSON and nothing around it. thoughts: None for a model that has none apart."""

    calls: Calls | None
    thoughts: Thoughts | None

    @property
    def channels(self) -> bool:
        """Whether calls, thoughts and answers are all told apart by channels."""
        return self.calls is harmony.HARMONY

    @property
    def thinks(self) -> bool:
        """Whether the model has a place for thoughts."""
        return self.thoughts is not None or self.channels

    def tags(self, calls: bool) -> tuple[str, ...]:
        """What a reader looks for, with calls or without; special tokens among it have to be in the text."""
        of_calls = (*(self.calls.tags if self.calls else ()), bare_json.PYTHON) if calls or self.channels else ()
        return of_calls + ((self.thoughts.open, self.thoughts.close) if self.thoughts else ())

    def inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins in the midst of thoughts."""
        return self.thoughts is not None and self.thoughts.opened(prompt)

    @property
    def end_of_thoughts(self) -> str:
        """What has to be written in the midst of thoughts for the answer to begin."""
        if self.channels:
            return f"<|end|>{harmony.START}assistant{harmony.FINAL}"
        return self.thoughts.end if self.thoughts else ""

    def begun(self, prompt: str, think: bool | None) -> str:
        """The prompt; where the model is not to think, so that its answer begins at once."""
        if think is not False:
            return prompt
        if self.channels:
            return prompt + harmony.FINAL
        t = self.thoughts
        if t is None or prompt.rstrip().endswith(t.close):
            return prompt
        return prompt + (t.end.lstrip("\n") if t.opened(prompt) else t.none)


def switches(template: str, think: bool | None, effort: str | None) -> dict[str, object]:
    """What a template is told of how much to think, as far as it has a word for it."""
    found: dict[str, object] = {}
    if think is not None:
        found |= {name: think for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template)}
    return found | ({"reasoning_effort": effort} if effort and "reasoning_effort" in template else {})


def ways_by(mark: str) -> Ways:
    """The ways of a model whose thoughts are marked so: how `marks` names them."""
    if mark == harmony.CHANNEL:
        return Ways(harmony.HARMONY, None)
    return Ways(None, next(s for s in SECTIONS if s.open == mark))


def marks(ways: Ways, prompt: str) -> dict[str, object] | None:
    """How thoughts are marked in an answer to this prompt, as data; None for a model that has none apart."""
    if ways.channels:
        return {"by": harmony.CHANNEL, "inside": False}
    return None if ways.thoughts is None else {"by": ways.thoughts.open, "inside": ways.inside(prompt)}


MARKS: tuple[tuple[tuple[str, ...], Calls], ...] = (  # all of which a template holds -> its calls
    (("<|channel|>", "<|message|>"), harmony.HARMONY),
    (("<minimax:tool_call>",), elements.MINIMAX),
    (("<|tool_call>", "<tool_call|>"), braces.GEMMA),
    (("<start_function_call>",), braces.FUNCTION_GEMMA),
    (("<longcat_tool_call>",), pairs.LONGCAT),
    (("<arg_key>",), pairs.GLM),
    (("<|tool_call_start|>",), python_calls.LFM),
    (("<|tool_list_start|>",), python_calls.LFM),
    (("<function_calls>",), python_calls.OLMO),
    (("<seed:tool_call>",), elements.SEED),
    (("<function=",), elements.QWEN),
    (("｜DSML｜",), elements.DEEPSEEK),
    (("<｜tool▁calls▁begin｜>",), headed_json.DEEPSEEK),
    (("<|tool_call_begin|>",), headed_json.KIMI),
    (("[TOOL_CALLS]",), headed_json.MISTRAL),
    *(((kind.open,), kind) for kind in tagged_json.KINDS),
    (("<|header_start|>",), python_calls.LLAMA4),
)


def ways_of(template: str, added: Container[str]) -> Ways:
    """What a template, and the tokens that were added to the vocabulary, say of how a model writes."""
    calls = next((c for marks, c in MARKS if all(m in template for m in marks)), None)
    return Ways(calls, None if calls is harmony.HARMONY else section_of(template, added))
