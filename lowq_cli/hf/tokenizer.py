"""Loads a model folder's tokenizer with transformers, without importing modeling code (3.7 s on one core)."""

from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lowq_cli.files.checked_view import only_its_files
from lowq_cli.files.resolution import TOKENIZER
from lowq_cli.files.source import Source
from lowq_cli.files.templates import old_template
from lowq_cli.files.tokenizer_growth import check_growth
from lowq_cli.hf.chat_template import render
from lowq_packers.errors import DamagedError, LowqError, NotFoundError, UnsupportedError, is_no_refusal, no_panic, one_line
from lowq_packers.regular import read_text

FILES = ("tokenizer.json", TOKENIZER, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json")


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder.

    Raises NotFoundError if there is none, UnsupportedError if it is code, DamagedError if it cannot be read, and the errors of
    `check_growth`.
    """
    named = _Named(source)
    try:  # trust_remote_code=False: without it transformers asks on stdin whether to run the folder's code
        with only_its_files(source) as view, no_panic(named):
            tokenizer = AutoTokenizer.from_pretrained(str(view), local_files_only=True, trust_remote_code=False)
        tokenizer.name_or_path = str(source.folder)
    except Exception as e:  # tokenizer classes raise various errors for missing or damaged files
        if is_no_refusal(e):
            raise
        if "trust_remote_code" in str(e):
            raise UnsupportedError(
                f"the tokenizer of {source.name} is code of its own, which lowq does not run; with a tokenizer.json there, "
                f"take auto_map out of tokenizer_config.json and write PreTrainedTokenizerFast for its tokenizer_class"
            ) from e
        if source.folder is not None and not _has_tokenizer(source):
            raise NotFoundError(
                f"{source.name} has no tokenizer; copy tokenizer.json and tokenizer_config.json into {source.folder}"
            ) from e
        raise DamagedError(f"{named} cannot be read: {one_line(e)}") from e
    if hasattr(tokenizer, "deprecation_warnings"):  # turns off the warning of long texts: callers check lengths
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if not isinstance(tokenizer.model_max_length, int | float):  # any other value is an error at the first text
        raise DamagedError(f"model_max_length in {source.name}/{TOKENIZER} must be a number")
    if tokenizer.is_fast:
        check_growth(tokenizer.backend_tokenizer, f"the tokenizer of {source.name}")
    if tokenizer.chat_template is None and source.folder is not None:
        tokenizer.chat_template = old_template(source.folder)
    tokenizer.apply_chat_template = _WithinMeans(tokenizer)  # type: ignore[method-assign]
    for name in ("_encode_plus", "_decode"):
        setattr(tokenizer, name, _InALine(tokenizer, name))
    return tokenizer


def is_its_backend(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's class encodes and decodes exactly like the tokenizers.Tokenizer in it."""
    calls = ("__call__", "_encode_plus", "decode", "_decode")
    return all(getattr(type(tokenizer), c) is getattr(PreTrainedTokenizerFast, c, None) for c in calls)


class _Named:
    """A source's tokenizer in messages, with the files that may be at fault, which are looked at when the text is needed."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __str__(self) -> str:
        folder = self.source.folder
        names = [n for n in FILES if folder is not None and (folder / n).is_file()]
        if folder is not None and FILES[0] in names:
            try:
                with no_panic(FILES[0]):
                    Tokenizer.from_str(read_text(folder / FILES[0]))
            except (LowqError, ValueError):
                names = [FILES[0]]
        return f"the tokenizer of {self.source.name}" + (f" ({', '.join(names)})" if names else "")


class _InALine:
    """Wraps a method of a tokenizer's class to turn its library's errors into lowq's; can be copied and pickled with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, method: str) -> None:
        self.tokenizer, self.method = tokenizer, method

    def __call__(self, *args: Any, **how: Any) -> Any:
        with no_panic("the tokenizer"):
            return getattr(type(self.tokenizer), self.method)(self.tokenizer, *args, **how)


class _WithinMeans:
    """apply_chat_template with limits on the template's time and memory for lowq's calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, conversation: Any, *args: Any, **how: Any) -> Any:
        tokenizer = self.tokenizer
        ours = {"add_generation_prompt", "tokenize", "return_dict"}
        if args or not ours <= how.keys() or how["return_dict"]:
            return type(tokenizer).apply_chat_template(tokenizer, conversation, *args, **how)
        more = {name: value for name, value in how.items() if name not in ours}
        facts = tokenizer.special_tokens_map
        text = render(tokenizer.get_chat_template(), conversation, how["add_generation_prompt"], facts, **more)
        return tokenizer(text, add_special_tokens=False)["input_ids"] if how["tokenize"] else text


def _has_tokenizer(source: Source) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return source.folder is not None and any((source.folder / n).is_file() for n in names)
