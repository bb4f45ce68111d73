"""Refuse config fields that redirect to other files or code, and links that lead out of a model's folder."""

import os
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lowq_cli.files.safetensors_io import read_json
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.regular import MAX_CONFIG, MAX_TEXT, open_bounded

REDIRECTS = {  # field of config.json -> its effect in transformers
    "transformers_weights": "names other weights",
    "configuration_files": "names other configs",
}
COMPUTED_BY = ("attn_implementation", "experts_implementation")  # fields that may name code on a hub: "org/kernel:function"
TOKENIZER = "tokenizer_config.json"
ENDS = 1 << 10  # bytes read at each end of a vocabulary, which may have spaces there
LARGE = ("tokenizer.", "vocab.", "merges.", ".model", ".tiktoken")  # prefixes and suffixes of companion files with a vocabulary


def check_config(config: Mapping[str, Any], where: object) -> None:
    """Raise UnsupportedError for fields of a config.json that make transformers load other files or code."""
    waiting: list[Any] = [config]
    while waiting:
        table = waiting.pop()
        for key, value in table.items() if isinstance(table, Mapping) else enumerate(table):
            if isinstance(value, Mapping | list):
                waiting.append(value)
            if key in REDIRECTS and value is not None:
                raise UnsupportedError(f"{where} has {key}, which {REDIRECTS[key]}; take it out")
            if str(key).removesuffix("_internal").endswith(COMPUTED_BY) and _is_code(value):
                raise UnsupportedError(f"{where} has {key}={value!r}, code of a hub, which lowq does not run; take it out")


def _is_code(value: Any) -> bool:
    named = value.values() if isinstance(value, Mapping) else [value]
    return any(isinstance(v, str) and ("/" in v or ":" in v) for v in named)


def check_tokenizer(folder: Path) -> None:
    """Raise UnsupportedError if a folder's tokenizer_config.json names other tokenizer files."""
    path = folder / TOKENIZER
    if path.is_file() and read_json(path).get("fast_tokenizer_files") not in (None, ["tokenizer.json"]):
        raise UnsupportedError(f"{path} has fast_tokenizer_files, which names other files; take it out")


def is_own(path: Path) -> bool:
    """Whether a companion is not a link, or is a link to a file of the same name, within the folder or within a hub cache."""
    if not path.is_symlink():
        return True
    target, folder = path.resolve(), path.parent.resolve()
    snapshot = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    return snapshot or target.name == path.name or target.is_relative_to(folder)


def _is_whole(file: BinaryIO) -> bool:
    """Whether a file begins with { and ends with }: one that was cut off while it was fetched does not."""
    begin = file.read(ENDS)
    file.seek(-min(ENDS, file.seek(0, os.SEEK_END)), os.SEEK_END)
    return begin.removeprefix(BOM_UTF8).lstrip().startswith(b"{") and file.read().rstrip().endswith(b"}")


def check_companions(files: list[Path]) -> list[Path]:
    """Check the companions of a model, because other libraries open them directly, without saying which one they could not
    read; returns them.

    Raises DamagedError for one that is not a regular file, is too large, is no JSON object (of vocabularies only the ends are
    read here), or links to a file of another name elsewhere.
    """
    for path in files:
        large = path.name.startswith(LARGE) or path.suffix in LARGE
        with os.fdopen(open_bounded(path, MAX_TEXT if large else MAX_CONFIG), "rb") as file:
            if path.suffix == ".json" and large and not _is_whole(file):
                raise DamagedError(f"{path} does not begin and end as a JSON object does; fetch the model again")
        if path.suffix == ".json" and not large:
            read_json(path, MAX_CONFIG)
        if not is_own(path):
            raise DamagedError(
                f"{path} is a link to {path.resolve()}, outside the model's folder; copy it there if it belongs to the model"
            )
    return files
