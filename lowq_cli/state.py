"""Folders in the user's home, and what is remembered there between commands: the checkpoints that `quantize` wrote."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from lowq_cli import console
from lowq_packers.atomic import write_whole
from lowq_packers.errors import NotFoundError

LAST = "last.json"
REMEMBERED = 100  # checkpoints


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


@dataclass(frozen=True)
class Known:
    """A checkpoint that `quantize` wrote: its folder, the working folder it was written from ("" if unknown), and when."""

    checkpoint: Path
    where: str = ""
    time: float = 0.0


def known() -> list[Known]:
    """The checkpoints written by this user that are still there, the newest last."""
    try:
        said = json.loads((state_dir() / LAST).read_text())
        rows = said.get("known") or [{"checkpoint": said["checkpoint"]}]
        found = [Known(Path(r["checkpoint"]), str(r.get("where", "")), float(r.get("time", 0))) for r in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [k for k in found if k.checkpoint.is_dir()]


def remember(checkpoint: Path) -> None:
    """Note `checkpoint` as the last one written; a home that is read-only or not there is no error."""
    folder = checkpoint.resolve()
    try:
        others = [k for k in known() if k.checkpoint != folder][1 - REMEMBERED :]
        remember_only([*others, Known(folder, str(Path.cwd()), time.time())])
    except (OSError, NotFoundError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        console.say(f"note: could not remember this checkpoint for later commands ({why})")


def remember_only(rows: list[Known]) -> None:
    """Set down the known checkpoints."""
    plain = [{"checkpoint": str(k.checkpoint), "where": k.where, "time": k.time} for k in rows]
    write_whole(state_dir() / LAST, json.dumps({"known": plain}).encode())


def checkpoint_or_last(given: str | None) -> str:
    """`given`, or the last checkpoint written from this working folder, or the last of all (named on stderr).

    Raises NotFoundError when there is none.
    """
    if given is not None:
        return given
    found = known()
    if not found:
        raise NotFoundError("no checkpoint given, and none known that was written on this machine; run: lowq quantize demo")
    here = [k for k in found if k.where == str(Path.cwd())]
    last = (here or found)[-1]
    elsewhere = f" (written from {last.where}; none was from here)" if last.where and not here else ""
    console.say(f"using {last.checkpoint}{elsewhere}")
    return str(last.checkpoint)
