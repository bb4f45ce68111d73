"""A folder's tokenizer.json through the tokenizers library, with the ids that transformers' AutoTokenizer gives.

It loads folders for which transformers uses the file unchanged. It also loads Qwen 2's, where transformers takes only the
vocabulary and merges from the file and builds the rest, if the file's rest is the same. Other folders raise NotPlain.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowq_cli.engine.tokenizer import FastTokenizer
from lowq_cli.files.templates import chat_templates
from lowq_cli.files.tokenizer_growth import check_growth
from lowq_packers.arch.config import NotPlain
from lowq_packers.errors import LowqError, no_panic
from lowq_packers.regular import MAX_CONFIG, read_text

AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
ALWAYS_AS_IT_IS, ALWAYS_QWEN = ("phi3",), ("qwen2",)  # model types whose tokenizer_class transformers ignores
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
QWEN_PATTERN = (  # the pattern of transformers' Qwen2Tokenizer
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PRE = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def read_tokenizer(folder: Path, model_type: str) -> FastTokenizer:
    """The tokenizer of a folder. Raises NotPlain where transformers may build a different one, and as `check_growth`."""
    from tokenizers import Tokenizer

    file, facts = folder / "tokenizer.json", _json(folder / "tokenizer_config.json")
    if not file.is_file() or (folder / "tekken.json").exists():
        raise NotPlain("tokenizer files of another kind")
    try:
        text = read_text(file)
        with no_panic(str(file)):
            tokens = Tokenizer.from_str(text)
    except (LowqError, ValueError) as e:  # transformers reads it, or reports what is wrong with it
        raise NotPlain(f"tokenizer.json: {e}") from e
    check_growth(tokens, file)
    head = _without_vocabulary(text)
    try:
        _check_class(facts, model_type, head)
        _check_special(folder, facts, head)
    except (AttributeError, KeyError, TypeError, ValueError) as e:  # a field of another type
        raise NotPlain(f"tokenizer_config.json: {e}") from e
    if model_type in ("mistral", "mixtral") and tokens.get_vocab_size() > 100_000:
        raise NotPlain("a pre-tokenizer pattern that transformers corrects")
    named = {n: _spelled(facts[n]) for n in NAMED if facts.get(n) is not None}
    return FastTokenizer(tokens, named, chat_templates(folder, facts), file=file)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path, MAX_CONFIG))
    except (LowqError, ValueError, RecursionError) as e:
        raise NotPlain(f"{path.name}: {e}") from None
    if not isinstance(content, dict):
        raise NotPlain(f"{path.name} is not a table")
    return content


def _without_vocabulary(text: str) -> dict[str, Any]:
    """tokenizer.json without its vocabulary and merges, which are not needed as Python objects."""
    head, model_key, model = text.partition('"model"')
    if not model_key or '"vocab"' in head:
        return json.loads(text)
    try:
        parsed: dict[str, Any] = json.loads(head.rstrip().rstrip(",") + "}")
        facts = model.partition('"vocab"')[0].strip().lstrip(":").rstrip().rstrip(",")
        return parsed | {"model": json.loads(facts + "}")}
    except ValueError:  # the sections have another order
        return json.loads(text)


def _check_class(facts: Mapping[str, Any], model_type: str, head: Mapping[str, Any]) -> None:
    """Raise NotPlain unless transformers builds the tokenizer that the file describes."""
    named = facts.get("tokenizer_class")
    if facts.get("auto_map") or not isinstance(named, str):
        raise NotPlain("an unknown class of tokenizer")
    if model_type in ALWAYS_AS_IT_IS or (named in AS_IT_IS and model_type not in ALWAYS_QWEN):
        return
    if named.removesuffix("Fast") != "Qwen2Tokenizer" and model_type not in ALWAYS_QWEN:
        raise NotPlain(f"{named} builds its own")
    model = head.get("model", {})
    plain = all(not model.get(k) for k in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    plain = plain and not any(model.get(k) for k in ("fuse_unk", "byte_fallback", "ignore_merges"))
    decoder = (head.get("decoder") or {}).get("type")
    plain = plain and head.get("normalizer") == {"type": "NFC"} and head.get("pre_tokenizer") == QWEN_PRE
    if not plain or decoder != "ByteLevel":
        raise NotPlain(f"{named} builds another one")


def _check_special(folder: Path, facts: Mapping[str, Any], head: Mapping[str, Any]) -> None:
    """Raise NotPlain unless tokenizer.json has every special token of the other files, with the same flags."""
    added = {t["id"]: {k: t.get(k, False) for k in FLAGS} for t in head.get("added_tokens", ())}
    special = {t["content"] for t in added.values() if t["special"]}
    decoder = facts.get("added_tokens_decoder")
    if decoder is None and any((folder / f).exists() for f in ("special_tokens_map.json", "added_tokens.json")):
        raise NotPlain("special tokens in files of their own")
    if decoder is not None and {int(i): {k: t.get(k, False) for k in FLAGS} for i, t in decoder.items()} != added:
        raise NotPlain("added tokens that tokenizer.json does not have")
    extra = facts.get("extra_special_tokens") or facts.get("additional_special_tokens") or []
    names = [v for k, v in facts.items() if k.endswith("_token") and v is not None and not isinstance(v, bool)]
    if any(isinstance(facts.get(n), bool) for n in NAMED):
        raise NotPlain("special tokens that are not texts")
    known = isinstance(extra, list) and {_spelled(t) for t in [*extra, *names]} <= special
    if not known or facts.get("split_special_tokens"):
        raise NotPlain("special tokens that tokenizer.json does not have")
    if any(k.endswith("_token") and k not in NAMED and isinstance(v, str) for k, v in facts.items()):
        raise NotPlain("special tokens of the model's own")


def _spelled(token: Any) -> str:
    """A token's text; configs write it either as a string or as a dict with flags."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)
