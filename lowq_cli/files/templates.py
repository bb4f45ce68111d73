"""Find a folder's chat templates: separate files take precedence over tokenizer_config.json, as in transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowq_cli.files.resolution import TOKENIZER
from lowq_cli.files.safetensors_io import read_json
from lowq_packers.errors import DamagedError, LowqError
from lowq_packers.regular import MAX_CONFIG, read_text

OWN, OTHERS, OLD = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
Templates = str | dict[str, str] | None


def chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> Templates:
    """The template of a folder, or several by name; None without a template. Raises DamagedError for other values there."""
    files = [*folder.glob(f"{OTHERS}/*.jinja"), *folder.glob(OWN)]
    if files:
        templates = {"default" if f.name == OWN else f.stem: read_text(f, MAX_CONFIG) for f in files}
        return templates["default"] if templates.keys() == {"default"} else templates
    named = tokenizer_config.get("chat_template")
    if isinstance(named, list) and all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in named):
        named = {t["name"]: t["template"] for t in named}
    if isinstance(named, dict) and all(isinstance(part, str) for pair in named.items() for part in pair):
        return named
    if not isinstance(named, str | None):
        raise DamagedError(
            f"{folder / TOKENIZER} has a chat_template that is neither a text nor a list of texts with names; mend it, or take "
            "it out"
        )
    return named if named is not None else old_template(folder)


def has_template(folder: Path) -> bool:
    """Whether a model's folder holds a chat template."""
    config = folder / TOKENIZER
    try:
        text = read_text(config, MAX_CONFIG) if config.exists() else ""
    except LowqError:
        text = ""
    return any(folder.glob("chat_template.*")) or '"chat_template"' in text


def old_template(folder: Path) -> str | None:
    """The template in a file of vision models' processors, which transformers' tokenizers do not read."""
    path = folder / OLD
    template = read_json(path, MAX_CONFIG).get("chat_template") if path.is_file() else None
    return template if isinstance(template, str) else None


def in_one_folder(files: Mapping[str, bytes], others: Mapping[str, str]) -> dict[str, bytes]:
    """A folder's files with the additional templates `others` (by name) moved from their subfolder into a list in
    tokenizer_config.json, a form that older readers support too; no template is lost.
    """
    if not others:
        return dict(files)
    facts = json.loads(files.get(TOKENIZER, b"{}"))
    named = ({"default": files[OWN].decode()} if OWN in files else {}) | dict(others)
    facts["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    return {n: c for n, c in files.items() if n != OWN} | {TOKENIZER: json.dumps(facts, indent=2, ensure_ascii=False).encode()}
