"""A tokenizer.json as the metadata of a GGUF file, and back: byte-level BPE, split as llama.cpp names it.

What llama.cpp and tokenizers do alike is written and read, the rest refused or left: SentencePiece, and rules for splitting a
text that have no name here.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.templates import chat_templates
from lowq_cli.interop.gguf_file import INT32, STRING, Value, array, flag, text, u32
from lowq_packers.atomic import write_whole
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {_SPLIT % "{1,3}": "llama-bpe", _SPLIT % "": "qwen2"}  # tokenizer.json's rule -> llama.cpp's name of it
LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")  # names of one rule
TEMPLATE = "tokenizer.chat_template"  # the default one's key; with a dot and a name behind it, another's
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], size: int) -> list[tuple[str, Value]]:
    """Vocabulary, merges and special tokens from a folder's tokenizer.json, for a model of `size` tokens.

    Raises NotFoundError, DamagedError, and UnsupportedError for anything but byte-level BPE.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} has no tokenizer.json, which a GGUF file must contain")
    content = read_json(path)
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback") or not isinstance(model.get("vocab"), dict):
        raise UnsupportedError(
            f"its tokenizer is {model.get('type')} and no byte-level BPE; convert it with llama.cpp's own script"
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    known = {**model["vocab"], **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
    for token, i in known.items():
        if not 0 <= i < size:
            raise DamagedError(f"{path}: token {token!r} has the number {i}; the model has {size}")
        tokens[i], kinds[i] = token, NORMAL
    for t in content.get("added_tokens") or ():
        kinds[t["id"]] = CONTROL if t.get("special") else USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ()]
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    values = [
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text(_pre_tokenizer(content))),
        ("tokenizer.ggml.tokens", array(tokens, of=STRING)),
        ("tokenizer.ggml.token_type", array(kinds, of=INT32)),
        ("tokenizer.ggml.merges", array(merges, of=STRING)),
        ("tokenizer.ggml.add_bos_token", flag(_adds_bos(content, settings))),
        ("tokenizer.ggml.add_eos_token", flag(False)),
    ]
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        i = config.get(key)
        i = i[0] if isinstance(i, list) and i else i
        if type(i) is int and 0 <= i < size:
            values.append((f"tokenizer.ggml.{name}_token_id", u32(i)))
    found = chat_templates(folder, settings)
    named = {"default": found} if isinstance(found, str) else found or {}
    others = sorted(named.keys() - {"default"})
    if "default" in named:
        values.append((TEMPLATE, text(named["default"])))
    if others:
        values.append((f"{TEMPLATE}s", array(others, of=STRING)))
    return [*values, *((f"{TEMPLATE}.{name}", text(named[name])) for name in others)]


def _walk(node: object, visit: Callable[[Mapping[str, Any]], None]) -> None:
    if isinstance(node, Mapping):
        visit(node)
        for child in node.values():
            _walk(child, visit)
    elif isinstance(node, list):
        for child in node:
            _walk(child, visit)


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for how text is split before merging. Raises UnsupportedError for a rule that it does not have."""
    patterns: list[str] = []
    byte_level: list[bool] = []

    def visit(node: Mapping[str, Any]) -> None:
        if node.get("type") == "Split":
            patterns.append(str((node.get("pattern") or {}).get("Regex")))
        if node.get("type") == "ByteLevel":
            byte_level.append(bool(node.get("use_regex", True)))

    _walk(content.get("pre_tokenizer"), visit)
    if byte_level and not patterns and byte_level[0]:
        return "gpt-2"
    if byte_level and len(patterns) == 1 and patterns[0] in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[patterns[0]]
    raise UnsupportedError(
        f"its tokenizer splits text by {json.dumps(patterns)[:80]}, a rule that llama.cpp has no name for here"
    )


def _adds_bos(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a text gets the beginning-of-text token in front."""
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said
    found: list[bool] = []
    template = (content.get("post_processor") or {}).get("single")
    _walk(template, lambda node: found.append("SpecialToken" in node))
    return any(found[:1]) or (isinstance(template, list) and bool(template) and "SpecialToken" in template[0])


def made_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """File name -> content of the tokenizer that a GGUF file's metadata stands for; {} where it is not one that lowq knows."""
    said = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    tokens, kinds, merges, pre = (said.get(k) for k in ("tokens", "token_type", "merges", "pre"))
    rule = next((r for r, name in PRE_TOKENIZERS.items() if name == ("llama-bpe" if pre in LLAMA_3 else pre)), None)
    lists = all(isinstance(x, list) for x in (tokens, kinds, merges))
    if said.get("model") != "gpt2" or (rule is None and pre != "gpt-2") or not lists or len(tokens) != len(kinds):  # type: ignore[arg-type]
        return {}
    assert isinstance(tokens, list)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": rule is None}
    split = [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}] if rule else []
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    numbered = list(zip(range(len(tokens)), tokens, kinds, strict=True))  # type: ignore[arg-type]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        i = said.get(f"{theirs}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            settings[f"{ours}_token"] = tokens[i]
    named = {
        k.removeprefix(f"{TEMPLATE}."): t for k, t in metadata.items() if k.startswith(f"{TEMPLATE}.") and isinstance(t, str)
    }
    if isinstance(template := metadata.get(TEMPLATE), str):
        named = {"default": template} | named
    if named:
        several = [{"name": n, "template": t} for n, t in named.items()]
        settings["chat_template"] = template if named.keys() == {"default"} else several
    bos = settings.get("bos_token") if said.get("add_bos_token", pre in LLAMA_3) else None
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, **plain, "special": kind == CONTROL} for i, t, kind in numbered if kind in (CONTROL, USER)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,  # as Qwen's own; GGUF does not say
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]},
        "post_processor": _puts_in_front(bos, tokens.index(bos)) if bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "ignore_merges": pre in LLAMA_3, "merges": merges,
            "vocab": {t: i for i, t, kind in numbered if kind != UNUSED},  # added tokens too: elsewhere they lose their numbers
        },
    }  # fmt: skip
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def _puts_in_front(token: str, number: int) -> dict[str, Any]:
    """A post-processor that begins every text with `token`."""
    first, rest = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    known = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [first, rest], "pair": [first, rest, second], "special_tokens": known}


def tokenizer_folder(path: Path, metadata: Mapping[str, Any], cache: Path) -> Path:
    """Where the tokenizer of a GGUF file is: beside it if there is one, else a folder made of its metadata in `cache`.

    The file's own folder where the metadata stand for none that lowq knows, or `cache` cannot be written.
    """
    if any((path.parent / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return path.parent
    files = {name: json.dumps(content, ensure_ascii=False) for name, content in made_tokenizer(metadata).items()}
    if not files:
        return path.parent
    try:
        for name, content in files.items():
            write_whole(cache / name, content.encode())
    except OSError:
        return path.parent
    return cache
