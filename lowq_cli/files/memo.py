"""What was measured once, kept as JSON in the user's cache folder; a hash of what it depends on names its file."""

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
    """A name for JSON-ready facts."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def recall(file: str | Path) -> dict[str, Any]:
    """The table in a file of the cache folder; {} where there is no home, no file, or no table in it."""
    try:
        found = json.loads(read_text(cache_dir() / file))
    except (LowqError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(file: str | Path, table: dict[str, Any]) -> None:
    """Write a table for `recall`; in a home that is read-only or not there it is measured again the next time."""
    with suppress(OSError, NotFoundError):
        write_whole(cache_dir() / file, json.dumps(table).encode())
