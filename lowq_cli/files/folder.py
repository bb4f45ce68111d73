"""A new folder that is whole or not there: made under another name, held by one process, gone on with after a kill."""

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowq_cli.files.atomic import writing
from lowq_packers.errors import DoesNotFitError, UsageError

RUN = "lowq-run"  # what an unfinished folder is a part of
LEFT = 3600  # seconds without a new file after which a folder that nobody holds is a killed process's


class BusyError(UsageError):
    """Another process is at it."""


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """`folder`, as a file descriptor, that no other process holds meanwhile (file systems without locks: hopefully).

    Raises BusyError at once where one does: a run takes hours, so none waits for another.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another lowq is writing to {folder}; wait for it, or use another --out") from None
        except OSError:
            pass  # a file system without locks
        yield fd
    finally:
        os.close(fd)


@contextmanager
def new_folder(target: Path, run: str | None = None) -> Iterator[Path]:
    """An `unfinished` folder beside `target`, renamed to it when it is whole. Raises as that does."""
    with unfinished(target, run) as partial:
        yield partial
        with writing(target):
            (partial / RUN).unlink(missing_ok=True)
            if target.is_dir():
                target.rmdir()
            os.replace(partial, target)


@contextmanager
def unfinished(target: Path, run: str | None = None) -> Iterator[Path]:
    """A folder under a temporary name beside `target`, for what will be there.

    It is removed in the end; with `run`, which names what is written, not after a kill, Ctrl-C, or where memory or disk were
    too small: the next call of the same run goes on in it.
    Raises UsageError if `target` holds anything, cannot be written, or another process writes it; DoesNotFitError if the disk
    is full.
    """
    check_free(target)
    # without a run a name of its own: two threads have one process id, and so may two containers that share a cache
    partial = target.with_name(f"{target.name}.partial" if run else f"{target.name}.{uuid.uuid4().hex[:12]}.partial")
    keep = run is not None
    with writing(target):
        partial.mkdir(parents=True, exist_ok=keep)
    try:
        with held(partial):
            if run is None:
                _sweep(target)
            else:
                _claim(partial, run)
            yield partial
        keep = False
    except BaseException as e:
        keep = keep and isinstance(e, KeyboardInterrupt | MemoryError | DoesNotFitError | BusyError)
        raise
    finally:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)  # gone already where it was renamed


def check_free(target: Path) -> None:
    """Raise UsageError if there is anything at `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; use another --out, or remove it")


def _claim(partial: Path, run: str) -> None:
    """Empty the folder unless it is of this run."""
    with writing(partial):
        if not (partial / RUN).is_file() or (partial / RUN).read_text() != run:
            for path in partial.iterdir():
                path.unlink()
            (partial / RUN).write_text(run)


def _sweep(target: Path) -> None:
    """Remove what killed processes left of `target` under names of their own: folders that nobody holds any more."""
    for path in target.parent.glob("*.partial"):
        if re.fullmatch(rf"{re.escape(target.name)}\.[0-9a-f]{{12}}\.partial", path.name):
            with suppress(OSError, BusyError):  # gone meanwhile, somebody else's, or held
                if time.time() - path.stat().st_mtime > LEFT:  # a younger one may be about to be held
                    with held(path):
                        shutil.rmtree(path)
