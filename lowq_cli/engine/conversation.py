"""The turns of a conversation as token ids, each prompt an extension of the text before it wherever the template allows."""

from typing import TYPE_CHECKING, Any

from lowq_cli.engine.prompts import check_characters, encode_messages, spelled_by
from lowq_cli.models import Tokenizer

if TYPE_CHECKING:
    from lowq_cli.engine.stream import Generation


class Conversation:
    """What was said so far. Models without a chat template simply continue the text.

    Args:
        tokenizer: its chat template, if it has one, writes the turns.
        system: said to the model before the first turn; "" for nothing.
        model: what pictures are shown to.
    Attributes:
        pictures: those of all turns, the next one's last.
    """

    def __init__(self, tokenizer: Tokenizer, system: str = "", model: Any = None) -> None:
        self.tokenizer, self.system, self.model = tokenizer, system, model
        self.template = bool(getattr(tokenizer, "chat_template", None))
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.text = f"{system}\n" if system else ""
        self.pictures: list[Any] = []
        self._new = 0  # pictures of the next turn

    def show(self, image: Any) -> None:
        """A picture that goes with what is said next. Raises as `Sight.picture`."""
        from lowq_cli.engine.sight import sight_of

        self.pictures.append(sight_of(self.model).picture(image))
        self._new += 1

    def prompt(self, said: str) -> list[int]:
        """Token ids of the conversation up to where the model's answer to `said` starts. Raises UsageError if it is no text."""
        check_characters(said)
        if self.template:
            return encode_messages(self.tokenizer, [*self.messages, self._message(said)], (self.model, self.pictures))
        text = self.text + said
        if self.pictures:
            from lowq_cli.engine.sight import sight_of

            text = sight_of(self.model).written(text, self.pictures, spelled_by(self.tokenizer))
        return list(self.tokenizer(text)["input_ids"])

    def _message(self, said: str) -> dict[str, Any]:
        if not self._new:
            return {"role": "user", "content": said}
        return {"role": "user", "content": [{"type": "image"}] * self._new + [{"type": "text", "text": said}]}

    def answered(self, said: str, answer: "Generation") -> None:
        """Note the turn, and tell the decoder which tokens its cache holds, so that the next turn reads only what is new."""
        self.messages += [self._message(said), {"role": "assistant", "content": answer.text}]
        self.text, self._new = self.text + said + answer.text + "\n", 0
        if hasattr(answer.decoder, "held"):
            answer.decoder.held = [p + t[:-1] for p, t in zip(answer.names, answer.tokens, strict=True)]
