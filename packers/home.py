"""lowq's folders in the user's home: what can be made again, and what it remembers."""

import os
from pathlib import Path

from lowq_packers.errors import NotFoundError


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
