"""Folders in the user's home, and what is remembered there between commands: the checkpoint that `quantize` wrote last."""

import json
import os
from pathlib import Path

from lowq_cli import console
from lowq_packers.atomic import write_whole
from lowq_packers.errors import NotFoundError

LAST = "last.json"


def state_dir() -> Path:
    """The user's state folder (XDG_STATE_HOME, else ~/.local/state), not created here. Raises NotFoundError: no home."""
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """The user's cache folder (XDG_CACHE_HOME, else ~/.cache), not created here. Raises NotFoundError: no home."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path:
    try:
        return Path(os.environ.get(variable) or Path.home() / below_home) / "lowq"
    except RuntimeError:
        raise NotFoundError(f"this user has no home folder; name another: {variable}=DIR") from None


def is_cached(path: Path) -> bool:
    """Whether a path lies in the user's cache folder."""
    try:
        return path.absolute().is_relative_to(cache_dir().absolute())
    except NotFoundError:
        return False


def user_path(name: str | os.PathLike[str]) -> Path:
    """The path that a person named, its ~ replaced; ~ stays where it names no user of this machine."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def remember(checkpoint: Path) -> None:
    """Note `checkpoint` as the last one written; a home that is read-only or not there is no error."""
    try:
        write_whole(state_dir() / LAST, json.dumps({"checkpoint": str(checkpoint.resolve())}).encode())
    except (OSError, NotFoundError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        console.say(f"note: could not remember this checkpoint for later commands ({why})")


def checkpoint_or_last(given: str | None) -> str:
    """`given`, or the last checkpoint written here (named on stderr). Raises NotFoundError when there is none."""
    if given is not None:
        return given
    try:
        last = Path(json.loads((state_dir() / LAST).read_text())["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        raise NotFoundError("no checkpoint given and none written yet on this machine; run: lowq quantize demo") from None
    if not last.is_dir():
        raise NotFoundError(f"the last checkpoint, {last}, is gone; name one, or run: lowq quantize demo")
    console.say(f"using {last}")
    return str(last)
