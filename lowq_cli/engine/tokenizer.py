"""One interface to a model's tokenizer, whether lowq (tokenizer_file.py) or transformers read its files.

Nearly every tokenizer is a `Tokenizer` of the tokenizers library. Then only that object is kept: it can be pickled for another
process, which imports transformers only to render a chat template (templates are untrusted programs, and transformers maintains
a sandbox for them). If the class in transformers does more than that object, the whole transformers tokenizer is kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowq_packers.errors import UnsupportedError, no_panic


class Added(NamedTuple):
    """A token that was added to a vocabulary. special: whether decoding skips it."""

    token: int
    special: bool


class LoadedTokenizer(ABC):
    """A model's tokenizer: ids of a text or a conversation, text of ids, bytes of a token.

    Attributes:
        named: the special tokens that a chat template may write, such as bos_token.
        chat_template: the template; or several by name, where "tool_use" is for conversations with tools; or None.
        bos_token_id, eos_token_id: the ids, or None.
    """

    named: dict[str, str]
    chat_template: str | dict[str, str] | None
    bos_token_id: int | None
    eos_token_id: int | None

    @abstractmethod
    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """A dict with the text's ids under "input_ids"."""

    @abstractmethod
    def get_vocab(self) -> dict[str, int]:
        """The spelling of every token, and its id."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of these tokens, with spaces as the decoder leaves them."""

    @abstractmethod
    def spelling(self, token: int) -> str | None:
        """A token's spelling in the vocabulary; None for an unknown id."""

    @abstractmethod
    def added_tokens(self) -> dict[str, Added]:
        """The tokens that were added to the vocabulary, by their texts."""

    @abstractmethod
    def definition(self) -> str | None:
        """The tokenizer as the text of a tokenizer.json; None where it is not from the tokenizers library."""

    def unchanged_file(self) -> Path | None:
        """A tokenizer.json that is equal to `definition`, if there is one: to write a large one takes 0.1 s, in which no other
        thread can run Python."""
        return None

    def template(self, with_tools: bool = False) -> str:
        """The chat template for conversations with or without tools, chosen as in transformers; "" without one.

        Raises UnsupportedError for several templates without a default.
        """
        given = self.chat_template or ""
        if isinstance(given, str):
            return given
        name = "tool_use" if with_tools and "tool_use" in given else "default"
        if name not in given:
            raise UnsupportedError(
                f"the model's chat templates are {', '.join(sorted(given))}, and none is the default; name one of them "
                "default, in tokenizer_config.json or as chat_template.jinja"
            )
        return given[name]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **named: Any,
    ) -> Any:
        """Token ids of a conversation, or its text, from the model's template; `named`: further variables of the template."""
        from lowq_cli.hf.chat_template import render

        template = self.template(with_tools=named.get("tools") is not None)
        assert template  # `encode` and Conversation have checked it
        text = render(template, messages, add_generation_prompt, {**self.named, **named})
        return self(text, add_special_tokens=False)["input_ids"] if tokenize else text

    def token_bytes(self, token: int) -> list[int] | None:
        """The bytes of a token that is part of a character; None where its spelling does not determine them."""
        spelled = self.spelling(token)
        if spelled is None:
            return None
        if spelled.startswith("<0x") and len(spelled) == 6:
            return [int(spelled[3:5], 16)]
        values = [BYTE_OF.get(c) for c in spelled]
        return None if None in values else values  # type: ignore[return-value]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters for bytes: a printable byte is itself, the other bytes are characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


class FastTokenizer(LoadedTokenizer):
    """A tokenizer of the tokenizers library: `tokens` is its Tokenizer; `file` describes the same one."""

    def __init__(
        self,
        tokens: Any,
        named: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
        source: str = "tokenizer.json",
        file: Path | None = None,
    ) -> None:
        self.tokens, self.named, self.chat_template, self.source = tokens, dict(named), chat_template, source
        self._file = None if file is None else (file.absolute(), _facts(file))
        tokens.no_truncation()
        tokens.no_padding()
        self.bos_token_id, self.eos_token_id = (self._id(name) for name in ("bos_token", "eos_token"))
        self.splits_special = tokens.encode_special_tokens

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokens.encode_special_tokens = self.splits_special  # pickling loses this attribute

    def _id(self, name: str) -> int | None:
        return self.tokens.token_to_id(self.named[name]) if name in self.named else None

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        # encoding a batch releases the interpreter's lock; a megabyte of text takes a second
        with no_panic(self.source):  # the library's regex engine may give up
            return {"input_ids": self.tokens.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids}

    def get_vocab(self) -> dict[str, int]:
        return self.tokens.get_vocab()

    def decode(self, ids: Sequence[int] | Any, skip_special_tokens: bool = False, **_: Any) -> str:
        with no_panic(self.source):
            return self.tokens.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens)

    def spelling(self, token: int) -> str | None:
        return self.tokens.id_to_token(token)

    def added_tokens(self) -> dict[str, Added]:
        return {t.content: Added(i, t.special) for i, t in self.tokens.get_added_tokens_decoder().items()}

    def definition(self) -> str | None:
        return self.tokens.to_str()

    def unchanged_file(self) -> Path | None:
        return self._file[0] if self._file is not None and self._file[1] == _facts(self._file[0]) else None


def _facts(file: Path) -> tuple[int, int] | None:
    """A file's size and the time of its last change, which differ if it was written since; None for a file that is gone."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


class WrappedTokenizer(LoadedTokenizer):
    """A transformers tokenizer whose class does more than its tokenizers.Tokenizer, or is written in Python."""

    def __init__(self, loaded: Any) -> None:
        self.whole, self.named, self.chat_template = loaded, loaded.special_tokens_map, loaded.chat_template
        self.bos_token_id, self.eos_token_id = loaded.bos_token_id, loaded.eos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(self.whole(text, add_special_tokens=add_special_tokens)["input_ids"])}

    def get_vocab(self) -> dict[str, int]:
        return self.whole.get_vocab()

    def decode(self, ids: Sequence[int] | Any, skip_special_tokens: bool = False, **_: Any) -> str:
        how = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return self.whole.decode([*map(int, ids)], **how)

    def spelling(self, token: int) -> str | None:
        return self.whole.convert_ids_to_tokens(token)

    def added_tokens(self) -> dict[str, Added]:
        left_out = set(self.whole.all_special_ids)
        return {t.content: Added(i, i in left_out) for i, t in self.whole.added_tokens_decoder.items()}

    def definition(self) -> str | None:
        return self.whole.backend_tokenizer.to_str() if self.whole.is_fast else None
