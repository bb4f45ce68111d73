"""The turns of a conversation as token ids, each prompt an extension of the text before it wherever the template allows."""

from typing import TYPE_CHECKING

from lowq_cli.engine.prompts import check_characters
from lowq_cli.models import Tokenizer

if TYPE_CHECKING:
    from lowq_cli.engine.stream import Generation


class Conversation:
    """What was said so far. Models without a chat template simply continue the text.

    Args:
        tokenizer: its chat template, if it has one, writes the turns.
        system: said to the model before the first turn; "" for nothing.
    """

    def __init__(self, tokenizer: Tokenizer, system: str = "") -> None:
        self.tokenizer, self.system = tokenizer, system
        self.template = bool(getattr(tokenizer, "chat_template", None))
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.text = f"{system}\n" if system else ""

    def prompt(self, said: str) -> list[int]:
        """Token ids of the conversation up to where the model's answer to `said` starts. Raises UsageError if it is no text."""
        check_characters(said)
        if not self.template:
            return list(self.tokenizer(self.text + said)["input_ids"])
        messages = [*self.messages, {"role": "user", "content": said}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))

    def answered(self, said: str, answer: "Generation") -> None:
        """Note the turn, and tell the decoder which tokens its cache holds, so that the next turn reads only what is new."""
        self.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer.text}]
        self.text += said + answer.text + "\n"
        if hasattr(answer.decoder, "held"):
            answer.decoder.held = [p + t[:-1] for p, t in zip(answer.prompts, answer.tokens, strict=True)]
