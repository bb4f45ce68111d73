"""Convert a tokenizer.json to the metadata of a GGUF file, and back: byte-level BPE with llama.cpp's named splitting rules.

Only features with the same behaviour in llama.cpp and tokenizers are converted. SentencePiece and splitting rules without a
name here are refused when writing and left out when reading.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowq_cli.files.safetensors_io import read_json
from lowq_cli.files.templates import chat_templates
from lowq_cli.interop.gguf_file import INT32, STRING, Value, array, flag, text, u32
from lowq_packers.atomic import write_whole
from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError, one_line

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {_SPLIT % "{1,3}": "llama-bpe", _SPLIT % "": "qwen2"}  # tokenizer.json's rule -> llama.cpp's name
LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")  # all names of one rule
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5
OF_OTHER_TYPES = (AttributeError, IndexError, KeyError, TypeError)  # errors at fields of other types than a tokenizer has
STOPS = ("eos", "eot", "eom")  # metadata's end tokens, which llama.cpp treats alike


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], size: int) -> list[tuple[str, Value]]:
    """Vocabulary, merges and special tokens from a folder's tokenizer.json, for a model of `size` tokens.

    Raises NotFoundError, DamagedError, and UnsupportedError for anything but byte-level BPE.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} has no tokenizer.json, which a GGUF file must contain")
    content = read_json(path)
    try:
        return _metadata(path, content, config, size)
    except OF_OTHER_TYPES as e:
        raise DamagedError(f"{path} is not a tokenizer: {type(e).__name__}: {one_line(e)}") from None


def _metadata(path: Path, content: dict[str, Any], config: Mapping[str, Any], size: int) -> list[tuple[str, Value]]:
    folder, model = path.parent, content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or not isinstance(model.get("vocab"), dict):
        raise UnsupportedError(
            f"its tokenizer is {model.get('type')}, not a byte-level BPE; convert it with llama.cpp's own script"
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    id_of = {**model["vocab"], **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}
    for token, i in id_of.items():
        if type(i) is not int or not 0 <= i < size:
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
        ("tokenizer.ggml.add_bos_token", flag(_adds(content, settings, "bos"))),
        ("tokenizer.ggml.add_eos_token", flag(_adds(content, settings, "eos"))),
    ]
    numbers = {"bos": config.get("bos_token_id"), "padding": config.get("pad_token_id")}
    numbers |= zip(STOPS, _stops(folder, config, id_of.get(_text_of(settings.get("eos_token")))), strict=False)
    for name, i in numbers.items():
        i = i[0] if isinstance(i, list) and i else i
        if type(i) is int and 0 <= i < size:
            values.append((f"tokenizer.ggml.{name}_token_id", u32(i)))
    return values + _templates(folder, settings)


def _text_of(token: object) -> str:
    """A special token's text from tokenizer_config.json, which holds the text or a table with it; "" for neither."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _stops(folder: Path, config: Mapping[str, Any], own: int | None) -> list[int]:
    """The end tokens, the tokenizer's `own` first. Raises UnsupportedError for more tokens than GGUF has keys."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    path = folder / "config.json" if ids is None else path
    ids = config.get("eos_token_id") if ids is None else ids
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(i) is int for i in ids):
        raise DamagedError(f"{path} has eos_token_id = {ids}, which are not token ids")
    stops = sorted(dict.fromkeys(ids), key=lambda i: i != own)
    if len(stops) > len(STOPS):
        raise UnsupportedError(
            f"{len(stops)} tokens end its texts ({', '.join(map(str, stops))}), and GGUF names {len(STOPS)}: take those out of "
            f"eos_token_id in {path} that it can do without"
        )
    return stops


def _templates(folder: Path, settings: Mapping[str, Any]) -> list[tuple[str, Value]]:
    """The chat template, and additional templates by name."""
    templates = chat_templates(folder, settings)
    named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    values = [("tokenizer.chat_template", text(named.pop("default")))] if "default" in named else []
    if named:
        values.append(("tokenizer.chat_templates", array(sorted(named), of=STRING)))
    return values + [(f"tokenizer.chat_template.{name}", text(named[name])) for name in sorted(named)]


def _walk(node: object, visit: Callable[[Mapping[str, Any]], None]) -> None:
    if isinstance(node, Mapping):
        visit(node)
        for child in node.values():
            _walk(child, visit)
    elif isinstance(node, list):
        for child in node:
            _walk(child, visit)


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer's splitting rule. Raises UnsupportedError for a rule that it does not have."""
    patterns: list[str] = []
    byte_level: list[bool] = []
    spaced: list[bool] = []
    changed: list[str] = []

    def visit(node: Mapping[str, Any]) -> None:
        if node.get("type") == "Split":
            patterns.append(str((node.get("pattern") or {}).get("Regex")))
        if node.get("type") == "ByteLevel":
            byte_level.append(bool(node.get("use_regex", True)))
            spaced.append(bool(node.get("add_prefix_space", False)))

    _walk(content.get("pre_tokenizer"), visit)
    _walk(content.get("normalizer"), lambda node: changed.append(str(node.get("type"))))
    if odd := next((kind for kind in changed if kind not in ("Sequence", "NFC", "None")), None):
        raise UnsupportedError(f"its tokenizer changes texts first ({odd}), which llama.cpp's byte-level BPE does not")
    if any(spaced):
        raise UnsupportedError("its tokenizer puts a space in front of texts, which llama.cpp's byte-level BPE does not")
    if byte_level and not patterns and byte_level[0]:
        return "gpt-2"
    if byte_level and len(patterns) == 1 and patterns[0] in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[patterns[0]]
    raise UnsupportedError(
        f"its tokenizer splits text by {json.dumps(patterns)[:80]}, a rule that llama.cpp has no name for here"
    )


def _adds(content: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> bool:
    """Whether the tokenizer adds the begin token ("bos") in front of a text, or the end token ("eos") after it.

    Raises UnsupportedError if it adds another token there, which GGUF cannot express.
    """
    setting = settings.get(f"add_{name}_token")
    if isinstance(setting, bool):
        return setting
    put: list[list[Mapping[str, Any]]] = []
    _walk(
        content.get("post_processor"), lambda node: put.append(node["single"]) if isinstance(node.get("single"), list) else None
    )
    nodes = put[-1] if put else []
    at = next((i for i, node in enumerate(nodes) if "Sequence" in node), len(nodes))
    added = [node["SpecialToken"]["id"] for node in (nodes[:at] if name == "bos" else nodes[at + 1 :])]
    usual = _text_of(settings.get(f"{name}_token"))
    if added and usual and added != [usual]:
        raise UnsupportedError(f"its tokenizer puts {' '.join(added)} around a text, GGUF's would put its {name} token {usual}")
    return bool(added)


def made_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """File name -> content of the tokenizer described by a GGUF file's metadata; {} for a tokenizer that lowq does not know."""
    facts = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items()}
    tokens, kinds, merges, pre = (facts.get(k) for k in ("tokens", "token_type", "merges", "pre"))
    rule = next((r for r, name in PRE_TOKENIZERS.items() if name == ("llama-bpe" if pre in LLAMA_3 else pre)), None)
    lists = all(isinstance(x, list) for x in (tokens, kinds, merges))
    if facts.get("model") != "gpt2" or (rule is None and pre != "gpt-2") or not lists or len(tokens) != len(kinds):  # type: ignore[arg-type]
        return {}
    assert isinstance(tokens, list)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": rule is None}
    split = [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}] if rule else []
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    numbered = list(zip(range(len(tokens)), tokens, kinds, strict=True))  # type: ignore[arg-type]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        i = facts.get(f"{theirs}_token_id")
        if type(i) is int and 0 <= i < len(tokens):
            settings[f"{ours}_token"] = tokens[i]
    if templates := _made_templates(metadata):
        settings["chat_template"] = templates
    bos = settings.get("bos_token") if facts.get("add_bos_token", pre in LLAMA_3) else None
    eos = settings.get("eos_token") if facts.get("add_eos_token") else None
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, **plain, "special": kind == CONTROL} for i, t, kind in numbered if kind in (CONTROL, USER)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,  # as in Qwen's tokenizer.json; not in GGUF
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]},
        "post_processor": post_processor(bos, eos, {t: tokens.index(t) for t in (bos, eos) if t}),
        "decoder": byte_level,
        "model": {
            "type": "BPE", "ignore_merges": pre in LLAMA_3, "merges": merges,
            "vocab": {t: i for i, t, kind in numbered if kind != UNUSED},  # with added tokens, which would otherwise change ids
        },
    }  # fmt: skip
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def _made_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """The chat template as in tokenizer_config.json, or several by name; "" for none."""
    default, prefix = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix) and isinstance(v, str)}
    if not isinstance(default, str) or not named:
        return default if isinstance(default, str) else [{"name": n, "template": t} for n, t in named.items()] or ""
    return [{"name": n, "template": t} for n, t in {"default": default, **named}.items()]


def post_processor(bos: str | None, eos: str | None, numbers: Mapping[str, int]) -> dict[str, Any] | None:
    """A post-processor that begins every text with `bos` and ends it with `eos`; None if there is neither."""
    if not numbers:
        return None

    def single(name: str) -> list[dict[str, Any]]:
        front, back = ([{"SpecialToken": {"id": t, "type_id": 0}}] if t else [] for t in (bos, eos))
        return [*front, {"Sequence": {"id": name, "type_id": 0}}, *back]

    entries = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in numbers.items()}
    pair = [*single("A"), {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single("A"), "pair": pair, "special_tokens": entries}


def tokenizer_folder(path: Path, metadata: Mapping[str, Any], cache: Path) -> Path:
    """The folder of a GGUF file's tokenizer: the file's folder if it holds one, else a folder in `cache` made from metadata.

    Falls back to the file's folder if lowq does not know the metadata's tokenizer or cannot write `cache`.
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
