"""What lowq remembers between commands: the checkpoint that `quantize` wrote last on this machine."""

import json
import os
from pathlib import Path

from lowq_cli import console
from lowq_packers.errors import NotFoundError

LAST = "last.json"


def state_dir() -> Path:
    """The user's state folder (XDG_STATE_HOME, else ~/.local/state), not created here."""
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "lowq"


def cache_dir() -> Path:
    """The user's cache folder (XDG_CACHE_HOME, else ~/.cache), not created here."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lowq"


def remember(checkpoint: Path) -> None:
    """Note `checkpoint` as the last one written; a read-only home is no error."""
    try:
        state_dir().mkdir(parents=True, exist_ok=True)
        partial = state_dir() / f"{LAST}.{os.getpid()}"
        partial.write_text(json.dumps({"checkpoint": str(checkpoint.resolve())}))
        partial.replace(state_dir() / LAST)
    except OSError as e:
        console.say(f"note: could not remember this checkpoint for later commands ({e.strerror})")


def checkpoint_or_last(given: str | None) -> str:
    """`given`, or the last checkpoint written here (named on stderr). Raises NotFoundError when there is none."""
    if given is not None:
        return given
    try:
        last = json.loads((state_dir() / LAST).read_text())["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise NotFoundError("no checkpoint given and none written yet on this machine; run: lowq quantize demo") from None
    if not Path(last).is_dir():
        raise NotFoundError(f"the last checkpoint, {last}, is gone; name one, or run: lowq quantize demo")
    console.say(f"using {last}")
    return last
