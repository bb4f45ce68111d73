"""Helpers of tests of model folders: their bytes, and a tokenizer for folders of random weights."""

import json
from pathlib import Path


def files(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by name, but for the log, which tells times."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lowq.log"}


def write_tokenizer(folder: Path) -> None:
    """160 words: w5 is token 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
