"""lowq's cache and state folders in the user's home, private to the user."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from lowq_packers.errors import NotFoundError, UnsupportedError


def state_dir() -> Path:
    """The user's state folder (XDG_STATE_HOME, else ~/.local/state). Raises as `_folder`."""
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    """The user's cache folder (XDG_CACHE_HOME, else ~/.cache). Raises as `_folder`."""
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, below_home: str) -> Path:
    """lowq's folder there, created if possible and closed to other users: it holds code that runs, and lists what `rm` deletes.

    Raises NotFoundError if this user has no home, or the folder is another user's.
    """
    try:
        path = Path(os.environ.get(variable) or Path.home() / below_home) / "lowq"
    except RuntimeError:
        raise NotFoundError(f"this user has no home folder; name another: {variable}=DIR") from None
    with suppress(OSError):  # a home that is read-only or missing: writing there reports it
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid():
            raise NotFoundError(f"{path} belongs to another user; name a folder of your own: {variable}=DIR")
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o700)
    return path


def check_own(path: Path, fd: int) -> None:
    """Raise UnsupportedError unless the open file `fd` is this user's and no other user may write into it."""
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise UnsupportedError(f"other users can write to {path}, so lowq does not run it")
