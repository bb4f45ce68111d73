"""The models that a server of many models offers: their names, paths and settings.

They come from three sources, of which the later takes precedence for a name: models that lowq wrote on this disk (`lowq ls`),
folders of models, and a TOML file:

    default = "qwen"            # the model for requests that name none
    memory = "40GB"             # limit for all loaded models together
    keep_alive = "10m"          # a model without a request for this long is unloaded
    kv_host = "8GB"             # host memory for cache blocks, including those of unloaded models
    folders = ["/srv/models"]

    [models.qwen]
    path = "/srv/models/Qwen3-8B-lowq-4b"
    aliases = ["gpt-4o"]        # other names of the model
    pin = true                  # loaded at the start, never unloaded
    max_batch = 16
    cache_tokens = 65536
    kv = "fp8"
    lora = {german = "/srv/adapters/german"}  # adapters of the model, each with a separate name
    temperature = 0.6           # default for requests; also top_p, top_k, repetition_penalty
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from lowq_cli import inventory, state
from lowq_cli.cached_models import DRAFTERS, called, model_name, model_path
from lowq_cli.engine.sampling import Sampling
from lowq_cli.files.source import CONFIG, DEMO
from lowq_cli.files.templates import has_template
from lowq_packers.errors import LowqError, NotFoundError, UsageError
from lowq_packers.regular import MAX_CONFIG, read_given, read_text

OFFERED = ("checkpoint", "run", "import", "refined")  # kinds of holdings to serve; exports would be the same models again
DRAWING = ("temperature", "top_p", "top_k", "repetition_penalty")
ENGINE = {"max_batch": "running"} | {n: n for n in ("cache_tokens", "kv", "deterministic", "draft")}
KV = ("16", "fp8", "4")  # as `decode.kv.KINDS`, which would import torch
TYPES: dict[str, tuple[type, ...]] = {
    **{"path": (str,), "pin": (bool,), "keep_alive": (str, int, float), "max_batch": (int,), "cache_tokens": (int,)},
    **{"kv": (str, int), "deterministic": (bool,), "draft": (str,), "lora": (dict,), "aliases": (list,)},
    **dict.fromkeys(DRAWING, (int, float)),
}
TOP: dict[str, tuple[type, ...]] = {
    **{"default": (str,), "memory": (str, int), "keep_alive": (str, int, float), "kv_host": (str, int)},
    **{"folders": (list,), "models": (dict,)},
}
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Offer:
    """A model that requests can name.

    path: as commands take it. how: settings of its engine that differ from the server's. pin: whether it is never unloaded.
    keep_alive: seconds without a request after which it is unloaded, None for the server's value. draw: defaults for sampling
    settings that requests leave out. aliases: other names of the model. where: its file and table, as in messages.
    """

    name: str
    path: str
    how: Mapping[str, Any] = field(default_factory=dict)
    pin: bool = False
    keep_alive: float | None = None
    draw: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    where: str = ""

    def named(self, e: LowqError) -> LowqError:
        """An error of loading the model, with the name of the file and the model that name it, and the file's keys in place of
        the flags of the same settings; `e` itself if no file names the model."""
        if not self.where:
            return e
        message = str(e)
        for key in (k for k, ours in ENGINE.items() if ours in self.how):
            message = message.replace(f"--{key.replace('_', '-')} ", f"{key} = ")
        return type(e)(f"{self.where}: {message}")

    @property
    def others(self) -> tuple[str, ...]:
        """Its other names: its aliases, and the names of its adapters."""
        return (*self.aliases, *self.lora)

    @property
    def lora(self) -> Mapping[str, str]:
        """The folders of its adapters, by the names that requests use."""
        folders: Mapping[str, str] = self.how.get("lora") or {}
        return folders

    @property
    def folder(self) -> Path:
        """Its path on this disk, if it is a local folder or file."""
        return DEMO if self.path == "demo" else state.user_path(self.path)

    def weight_bytes(self) -> int:
        """Return the bytes of its weights on disk, 0 where they are not on this disk."""
        files = [self.folder] if self.folder.is_file() else self.folder.glob("*.safetensors")
        try:
            return sum(f.stat().st_size for f in files)
        except OSError:
            return 0

    def published(self) -> dict[str, Any]:
        """Return what is known of it before it is loaded: its context length, whether it has a chat template, and the features
        that follow from this; others need the tokenizer."""
        try:
            config = json.loads(read_text(self.folder / CONFIG, MAX_CONFIG))
            inner = config.get("text_config") or config
            longest = inner.get("max_position_embeddings")
        except (LowqError, ValueError, AttributeError):  # no config, or JSON of another shape: loading the model reports it
            return {}
        chat = has_template(self.folder)
        features = ["completions", *["chat"] * chat]
        return {"max_model_len": longest if isinstance(longest, int) else None, "chat": chat, "features": features}


@dataclass(frozen=True)
class Config:
    """The settings of a server of many models, from flags and from a file; None for settings in neither."""

    models: Mapping[str, Offer] = field(default_factory=dict)
    folders: Sequence[str] = ()
    default: str | None = None
    memory: int | None = None
    keep_alive: float | None = None
    kv_host: int | None = None


def read_config(path: Path) -> Config:
    """Read the TOML file. Raises UsageError for invalid contents, NotFoundError where there is no file."""
    try:
        table = tomllib.loads(read_given(path, "configuration", MAX_CONFIG).decode())
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{path} is not TOML: {e}") from None
    _check(table, TOP, str(path))
    models = {}
    for name, given in table.get("models", {}).items():
        where = f"{path}: models.{name}"
        if not isinstance(given, dict) or "path" not in given:
            raise UsageError(f'{where} needs a path, such as path = "/srv/models/{name}"')
        _check(given, TYPES, where)
        models[name] = _offer(name, given, where, path.parent)
        if given["path"] in table["models"] and not _exists(models[name].folder, where):
            raise UsageError(f'{where}: path = {given["path"]} is a model of this file; write aliases = ["{name}"] there')
    names = Counter(n for o in models.values() for n in (o.name, *o.others))
    if twice := next((n for n, times in names.items() if times > 1 or not n.strip()), None):
        raise UsageError(f"{path}: {twice} is the name of several models, aliases or adapters; each needs one of its own")
    if twice is not None:
        raise UsageError(f"{path}: a name of a model, an alias or an adapter is empty; write one")
    folders = table.get("folders", [])
    if not all(isinstance(f, str) for f in folders):
        raise UsageError(f"{path}: folders must be a list of paths")
    return Config(
        models,
        [str(_in_folder(path.parent, f)) for f in folders],
        table.get("default"),
        None if "memory" not in table else size(table["memory"], f"{path}: memory"),
        None if "keep_alive" not in table else seconds(table["keep_alive"], f"{path}: keep_alive"),
        None if "kv_host" not in table else size(table["kv_host"], f"{path}: kv_host"),
    )


def _check(table: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], where: str) -> None:
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{where}: {name} is not known; there are {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and bool not in known[name]):
            raise UsageError(f"{where}: {name} = {value!r} must be {' or '.join(t.__name__ for t in known[name])}")


def _offer(name: str, given: Mapping[str, Any], where: str, folder: Path) -> Offer:
    how = {ours: given[theirs] for theirs, ours in ENGINE.items() if theirs in given}
    if "kv" in how:
        how["kv"] = str(how["kv"])
        if how["kv"] not in KV:
            raise UsageError(f"{where}: kv = {how['kv']} must be one of {', '.join(KV)}")
    for number in ("max_batch", "cache_tokens"):
        if given.get(number, 1) < 1:
            raise UsageError(f"{where}: {number} = {given[number]} must be at least 1")
    if "lora" in given:
        if wrong := next((n for n, d in given["lora"].items() if not isinstance(d, str)), None):
            raise UsageError(f"{where}: lora.{wrong} must be the path of a folder")
        how["lora"] = {n: str(_in_folder(folder, str(d))) for n, d in given["lora"].items()}
    draw = {n: given[n] for n in DRAWING if n in given}
    try:
        Sampling(**draw)
    except UsageError as e:
        raise UsageError(f"{where}: {e}") from None
    if not all(isinstance(a, str) for a in given.get("aliases", ())):
        raise UsageError(f"{where}: aliases must be a list of names")
    if (draft := how.get("draft", DRAFTERS[0])) not in DRAFTERS:
        how["draft"] = _model(folder, draft, where)
    alive = None if "keep_alive" not in given else seconds(given["keep_alive"], f"{where}: keep_alive")
    return Offer(
        name,
        _model(folder, given["path"], where),
        how,
        given.get("pin", False),
        alive,
        draw,
        tuple(given.get("aliases", ())),
        where,
    )


def _model(folder: Path, name: str, where: str) -> str:
    """Return the path of a model that the file in this folder names, by a path or as an argument of a command."""
    local = _in_folder(folder, name)
    return str(local) if _exists(local, where) else model_path(name)


def _exists(path: Path, where: str) -> bool:
    try:
        return path.exists()
    except OSError as e:  # a name that is too long, or a folder that this user may not read
        raise UsageError(f"{where}: {str(path)[:80]}: {e.strerror}") from None


def _in_folder(folder: Path, name: str) -> Path:
    return (folder / state.user_path(name)).absolute()


def gather(config: Config, folders: Sequence[str] = (), first: Offer | None = None) -> dict[str, Offer]:
    """Return every model that requests can name, by name. first: a model whose name takes precedence. Raises NotFoundError."""
    offers: dict[str, Offer] = {} if first is None else {first.name: first}
    named = {**offers, **config.models}
    aliases = {n for o in config.models.values() for n in o.others}
    for short, path in [*_in_folders([*folders, *config.folders]), *_written()]:
        if any(path == o.folder.absolute() for o in named.values()):
            continue
        name = next(n for n in (short, path.name, str(path)) if (n not in named and n not in aliases) or n == str(path))
        named.setdefault(name, Offer(name, str(path)))
    return named


def _written() -> list[tuple[str, Path]]:
    """Return names and folders of the models that `lowq ls` lists: those outside of the cache, then the newest first."""
    written = [h for h in inventory.holdings() if h.kind in OFFERED and _answers(h.path)]
    return [(model_name(h.path), h.path.absolute()) for h in sorted(written, key=lambda h: h.cached)]


def _answers(folder: Path) -> bool:
    """Whether a folder holds a model, and not a draft head. One whose config cannot be read is offered: its error says why."""
    from lowq_packers.heads import is_head

    if not isfile(folder / CONFIG):
        return False
    try:
        config = json.loads(read_text(folder / CONFIG, MAX_CONFIG))
    except (LowqError, ValueError):
        return True
    return not (isinstance(config, dict) and is_head(config))


def _in_folders(folders: Sequence[str]) -> list[tuple[str, Path]]:
    """Return names and paths of the models in these folders. Raises NotFoundError."""
    models: list[Path] = []
    for name in folders:
        folder = state.user_path(name)
        if not folder.is_dir():
            raise NotFoundError(f"{name} is not a folder; --models takes a folder with models in it")
        if (folder / CONFIG).is_file():
            models.append(folder.absolute())
            continue
        inner = sorted(folder.iterdir())
        files = [p for p in inner if p.suffix == ".gguf" and isfile(p) and "mmproj" not in p.name]  # towers, found by models
        models += [p.absolute() for p in inner if p in files or _answers(p)]
    return [(p.stem if p.suffix == ".gguf" else model_name(p), p) for p in models]


def size(value: str | int, where: str) -> int:
    """Return the bytes that "40GB", "1.5 GiB" or a number stands for. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(value), re.I)
    if match is None or not float(match[1]):
        raise UsageError(f"{where} = {value} is not a size; write it as 40GB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def seconds(value: str | float, where: str) -> float:
    """Return the seconds that "10m", "1h30m" or a number stands for; "never" is infinite. Raises UsageError."""
    text = str(value).strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", text)
    if text == "never":
        return float("inf")
    if not parts or re.fullmatch(r"(\d+(?:\.\d+)?\s*(ms|s|m|h|d|)\s*)+", text) is None:
        raise UsageError(f"{where} = {value} is not a time; write it as 30s, 10m, 1h or never")
    return sum(float(n) * SECONDS[unit] for n, unit in parts)


def given_name(model: str) -> str:
    """Return the name that clients use for a model given as a path or hub id: its folder's name, or its hub id."""
    folder = state.user_path(model)
    return called(folder) if folder.is_dir() else model
