"""The tokenizer of a model folder by transformers, without its modeling code (3.7 s on a core)."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lowq_cli.files.source import Source
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, one_line


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises NotFoundError if there is none, UnsupportedError if it is code, DamagedError if it cannot be read.
    """
    try:  # False: left out, transformers asks on stdin whether to run the folder's own code
        found = AutoTokenizer.from_pretrained(str(source.folder), local_files_only=True, trust_remote_code=False)
    except Exception as e:
        if "trust_remote_code" in str(e):
            raise UnsupportedError(
                f"the tokenizer of {source.name} is code of its own, which lowq does not run; with a tokenizer.json beside it, "
                f"take auto_map out of tokenizer_config.json and write PreTrainedTokenizerFast for its tokenizer_class"
            ) from e
        if source.folder is not None and not _has_tokenizer(source):
            raise NotFoundError(
                f"{source.name} has no tokenizer; copy tokenizer.json and tokenizer_config.json into {source.folder}"
            ) from e
        raise DamagedError(f"the tokenizer of {source.name} cannot be read: {one_line(e)}") from e
    if hasattr(found, "deprecation_warnings"):  # as if it had warned of a long text before: those who pass one check its length
        found.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return found


def _has_tokenizer(source: Source) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    return source.folder is not None and any((source.folder / n).is_file() for n in names)
