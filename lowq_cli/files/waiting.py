"""Wait for another process that already writes into the user's cache what a command needs, and show how far it has come."""

import time
from collections.abc import Callable
from pathlib import Path

from lowq_cli import console
from lowq_cli.files.locks import holder, is_held

LOOK_S = 0.2  # seconds between two looks at another process's lock; reading a journal of 500 tensors takes 2 ms


def announce(locks: Path, model: str) -> None:
    """Say which process downloads the model already, by the locks of the hub's client, which waits for it without a line."""
    taken = next((path for path in locks.glob("*.lock") if is_held(path)), None)
    if taken is not None:
        console.say(f"{_name(taken)} is downloading {model}; waiting for it, because this command needs the same files")


def _name(held: Path) -> str:
    process = holder(held)
    return "another process" if process is None else f"process {process}"


def wait(folder: Path, total: int = 0, written: Callable[[], int] | None = None) -> None:
    """Return once no other process holds `folder`, whether it finished or ended early.

    Nothing is written; Ctrl-C ends the waiting alone. written: how much of `total` is there, if this is known.
    """
    who = _name(folder)
    console.say(f"{who} is writing {folder}; waiting for it, because this command needs the same files")
    try:
        if written is None:
            with console.status(f"waiting for {who}"):
                while is_held(folder):
                    time.sleep(LOOK_S)
            return
        with console.progress("waiting", total, before=written()) as advance:
            while is_held(folder):
                advance(written(), f"for {who}")
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{who} goes on writing") from None
