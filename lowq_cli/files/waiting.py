"""Wait for another process that already writes into the user's cache what a command needs, and show how far it has come."""

import time
from collections.abc import Callable
from pathlib import Path

from lowq_cli import console
from lowq_cli.files.folder import holder, is_held

LOOK_S = 0.2  # seconds between two looks at another process's lock; reading a journal of 500 tensors takes 2 ms


def wait(folder: Path, total: int = 0, written: Callable[[], int] | None = None) -> None:
    """Return once no other process holds `folder`, whether it finished or ended early.

    Nothing is written; Ctrl-C ends the waiting alone. written: how much of `total` is there, if this is known.
    """
    process = holder(folder)
    who = "another lowq" if process is None else f"process {process}"
    console.say(f"{who} is writing {folder}; waiting for it, because this command needs the same files")
    try:
        if written is None:
            with console.status(f"waiting for {who}"):
                while is_held(folder):
                    time.sleep(LOOK_S)
            return
        with console.progress("waiting", total) as advance:
            while is_held(folder):
                advance(written(), f"for {who}")
                time.sleep(LOOK_S)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{who} goes on writing") from None
