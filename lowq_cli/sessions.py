"""Saved conversations of `lowq chat` in the user's state folder: their text, saved after every turn, and their cache."""

import json
import re
from pathlib import Path
from typing import Any

from lowq_cli.state import writing
from lowq_packers.atomic import write_whole
from lowq_packers.errors import DamagedError, UsageError
from lowq_packers.home import state_dir
from lowq_packers.regular import read_text

NAME = re.compile(r"\w[\w.-]{0,63}")
MOST = 64 << 20  # max. bytes of a file: far more than any model's context


def path_of(name: str) -> Path:
    """The file of a conversation. Raises UsageError for an invalid name, NotFoundError if this user has no home."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--session {name} must be a name of up to 64 letters, digits, and . _ -, of which . and - do not come first"
        )
    return state_dir() / "sessions" / f"{name}.json"


def cache_of(name: str) -> Path:
    """The file of a conversation's cache (`engine.saved_cache`). Raises as `path_of`."""
    return path_of(name).with_suffix(".safetensors")


def prepare(name: str) -> None:
    """Check that the conversation can be saved, before it begins. Raises as `path_of`; UsageError where it cannot."""
    with writing(path_of(name)):
        path_of(name).parent.mkdir(parents=True, exist_ok=True)


def read(name: str) -> tuple[str, list[dict[str, str]]]:
    """(system prompt, messages); both are empty for a new conversation. Raises DamagedError."""
    path = path_of(name)
    if not path.exists():
        return "", []
    try:
        content: dict[str, Any] = json.loads(read_text(path, MOST))
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in content["messages"]]
        return str(content["system"]), messages
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{path} is not a saved conversation; move it away, or use another --session") from None


def write(name: str, system: str, messages: list[dict[str, str]]) -> None:
    """Save a conversation's text; a new one has no cache. Raises UsageError if it cannot be written."""
    path, turns = path_of(name), [m for m in messages if m["role"] != "system"]
    try:
        if not turns:
            cache_of(name).unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"system": system, "messages": turns}, ensure_ascii=False).encode(errors="replace"))
    except OSError as e:
        raise UsageError(f"{path} cannot be written: {e.strerror}; the conversation is not kept") from None
