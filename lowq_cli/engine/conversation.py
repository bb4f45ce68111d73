"""The turns of a conversation as token ids; where the template allows, each prompt extends the previous sequence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowq_cli.engine.prompts import check_characters, encode_messages, spelled_by
from lowq_cli.models import Tokenizer

if TYPE_CHECKING:
    from lowq_cli.engine.stream import Generation


class Turns:
    """The messages so far. A model without a chat template simply continues the text.

    Args:
        template: whether the model has a chat template.
        system: the system message; "" for none.
        messages: earlier messages of the user and the model.
    """

    def __init__(self, template: bool, system: str = "", messages: Sequence[dict[str, Any]] = ()) -> None:
        self.template, self.system = template, system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.text = f"{system}\n" if system else ""
        for before, answer in zip(messages[::2], messages[1::2], strict=False):
            self.add(before["content"], answer["content"])

    def request(self, message: str) -> list[dict[str, Any]] | str:
        """The messages up to `message`, or without a template the text. Raises UsageError if `message` is not text."""
        check_characters(message)
        return [*self.messages, self._message(message)] if self.template else self.text + message

    def add(self, message: str, answer: str) -> None:
        """Note a turn."""
        self.messages += [self._message(message), {"role": "assistant", "content": answer}]
        self.text += message + answer + "\n"

    def think_of(self, thoughts: str) -> None:
        """Add the model's thoughts before its last answer to that message, for templates that use them."""
        if thoughts:
            self.messages[-1]["reasoning_content"] = thoughts

    def _message(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}


class Conversation(Turns):
    """A conversation that encodes the prompts of its turns.

    Args:
        tokenizer: its chat template, if it has one, formats the turns.
        model: the model that gets the images. think: False makes it answer without thinking first.
    Attributes:
        pictures: the images of all turns, the next turn's last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system: str = "",
        model: Any = None,
        messages: Sequence[dict[str, Any]] = (),
        think: bool | None = None,
    ) -> None:
        self.tokenizer, self.model, self.think = tokenizer, model, think
        self.pictures: list[Any] = []
        self._new = 0  # number of images of the next turn
        super().__init__(bool(getattr(tokenizer, "chat_template", None)), system, messages)

    def show(self, image: Any) -> None:
        """Add an image to the next message. Raises as `Sight.picture`."""
        from lowq_cli.engine.vision import sight_of

        self.pictures.append(sight_of(self.model).picture(image))
        self._new += 1

    def prompt(self, message: str) -> list[int]:
        """Token ids of the conversation up to the model's answer to `message`. Raises UsageError if `message` is not text."""
        request = self.request(message)
        if not isinstance(request, str):
            return encode_messages(self.tokenizer, request, (self.model, self.pictures), self.think)
        if self.pictures:
            from lowq_cli.engine.vision import sight_of

            request = sight_of(self.model).written(request, self.pictures, spelled_by(self.tokenizer))
        return list(self.tokenizer(request)["input_ids"])

    def _message(self, text: str) -> dict[str, Any]:
        if not self._new:
            return super()._message(text)
        return {"role": "user", "content": [{"type": "image"}] * self._new + [{"type": "text", "text": text}]}

    def answered(self, message: str, answer: "Generation", text: str | None = None) -> None:
        """Add the turn, and record the tokens that the decoder's cache holds, so that the next turn reads only new tokens.

        text: the answer, without the thoughts before it.
        """
        self.add(message, answer.text if text is None else text)
        self._new = 0
        if hasattr(answer.decoder, "held"):
            answer.decoder.held = [p + t[:-1] for p, t in zip(answer.names, answer.tokens, strict=True)]
