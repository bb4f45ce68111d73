"""Measurements kept as JSON in the user's cache folder, in files named by a hash of all facts that they depend on."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowq_packers.atomic import write_whole
from lowq_packers.errors import LowqError, NotFoundError
from lowq_packers.home import cache_dir
from lowq_packers.regular import read_text


def key(facts: Any) -> str:
    """A hash of JSON-ready facts, used as a file name."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def recall(file: str | Path) -> dict[str, Any]:
    """The table in a file of the cache folder; {} without a home folder, a file, or a table in the file."""
    try:
        entry = json.loads(read_text(cache_dir() / file))
    except (LowqError, ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def keep(file: str | Path, table: dict[str, Any]) -> None:
    """Write a table for `recall`; if the home folder is read-only or missing, nothing is kept and the next run remeasures."""
    with suppress(OSError, NotFoundError):
        write_whole(cache_dir() / file, json.dumps(table).encode())
