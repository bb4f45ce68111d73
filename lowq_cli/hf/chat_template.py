"""A conversation as its model's chat template writes it: a program from strangers, in the sandbox that transformers keeps safe.

Imported where a template is rendered, and only then: 0.8 s on a core.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def render(template: str, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, named: Mapping[str, str]) -> str:
    """The text of a conversation; `named` are the special tokens that templates may write."""
    facts: dict[str, Any] = {"chat_template": template, "add_generation_prompt": add_generation_prompt, **named}
    call: Any = render_jinja_template  # it says that it gives a text, and gives a pair of lists
    return call(conversations=[list(messages)], **facts)[0][0]
