"""Detects a model's syntax of calls and thoughts from the marks in its chat template, the most specific marks first."""

import re
from collections.abc import Container
from dataclasses import dataclass

from lowq_cli.output import bare_json, braces, elements, harmony, headed_json, key_values, python_calls, tagged_json
from lowq_cli.output.calls import Calls
from lowq_cli.output.thoughts import THOUGHT_MARKS, Thoughts, thought_marks_of


@dataclass(frozen=True)
class Syntax:
    """A model's syntax. calls: None for bare JSON. thoughts: None for a model without a separate section of thoughts."""

    calls: Calls | None
    thoughts: Thoughts | None

    @property
    def channels(self) -> bool:
        """Whether channels mark calls, thoughts and answers (gpt-oss)."""
        return self.calls is harmony.HARMONY

    @property
    def thinks(self) -> bool:
        """Whether the model has a separate section for thoughts."""
        return self.thoughts is not None or self.channels

    def tags(self, calls: bool) -> tuple[str, ...]:
        """The marks that a reader needs in the text, including special tokens. calls: whether to include those of calls."""
        of_calls = (*(self.calls.tags if self.calls else ()), bare_json.PYTHON) if calls or self.channels else ()
        return of_calls + ((self.thoughts.open, self.thoughts.close) if self.thoughts else ())

    def inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside thoughts."""
        return self.thoughts is not None and self.thoughts.opened(prompt)

    @property
    def end_of_thoughts(self) -> str:
        """The text that ends thoughts and begins the answer."""
        if self.channels:
            return f"<|end|>{harmony.START}assistant{harmony.FINAL}"
        return self.thoughts.end if self.thoughts else ""

    def begun(self, prompt: str, think: bool | None) -> str:
        """The prompt; if `think` is False, extended so that the answer begins at once."""
        if think is not False:
            return prompt
        if self.channels:
            return prompt + harmony.FINAL
        t = self.thoughts
        if t is None or prompt.rstrip().endswith(t.close):
            return prompt
        return prompt + (t.end.lstrip("\n") if t.opened(prompt) else t.none)


def switches(template: str, think: bool | None, effort: str | None) -> dict[str, object]:
    """The variables of thinking and of its effort that the template has."""
    values: dict[str, object] = {}
    if think is not None:
        values |= {name: think for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template)}
    return values | ({"reasoning_effort": effort} if effort and "reasoning_effort" in template else {})


def syntax_by(mark: str) -> Syntax:
    """The syntax of a model with this mark of thoughts, as in the "by" of `marks`."""
    if mark == harmony.CHANNEL:
        return Syntax(harmony.HARMONY, None)
    return Syntax(None, next(s for s in THOUGHT_MARKS if s.open == mark))


def marks(syntax: Syntax, prompt: str) -> dict[str, object] | None:
    """The marks of thoughts in an answer to this prompt, as JSON data; None for a model without a section of thoughts."""
    if syntax.channels:
        return {"by": harmony.CHANNEL, "inside": False}
    return None if syntax.thoughts is None else {"by": syntax.thoughts.open, "inside": syntax.inside(prompt)}


MARKS: tuple[tuple[tuple[str, ...], Calls], ...] = (  # marks that must all be in the template -> syntax of calls
    (("<|channel|>", "<|message|>"), harmony.HARMONY),
    (("<minimax:tool_call>",), elements.MINIMAX),
    (("<|tool_call>", "<tool_call|>"), braces.GEMMA),
    (("<start_function_call>",), braces.FUNCTION_GEMMA),
    (("<longcat_tool_call>",), key_values.LONGCAT),
    (("<arg_key>",), key_values.GLM),
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


def syntax_of(template: str, added: Container[str]) -> Syntax:
    """The syntax of a model with this template and these added tokens."""
    calls = next((c for marks, c in MARKS if all(m in template for m in marks)), None)
    return Syntax(calls, None if calls is harmony.HARMONY else thought_marks_of(template, added))
