"""A new folder that is whole or not there: made under another name, held by one process, gone on with after a kill.

Its name holds a random id, and so does the file OWNER in it, with what it will be: a folder that says less is somebody else's,
and is never touched.
"""

import fcntl
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowq_cli.files.source import STAGED
from lowq_cli.state import OWNER, begin, writing
from lowq_packers.errors import DoesNotFitError, UsageError

PATIENCE = 100  # times 10 ms
LEFT = 3600  # seconds without a new file after which a folder is a killed process's, where the file system has no locks


class BusyError(UsageError):
    """Another process is at it."""


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """`folder`, as a file descriptor, that no other process holds meanwhile (file systems without locks: hopefully).

    Raises BusyError at once where one does: a run takes hours, so none waits for another.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _lock(fd) is False:
            raise BusyError(f"another lowq is writing to {folder}; wait for it, or use another --out")
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> bool | None:
    """Whether this process has it now; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def new_folder(target: Path, run: str | None = None) -> Iterator[Path]:
    """An `unfinished` folder beside `target`, renamed to it when it is whole. Raises as that does."""
    with unfinished(target, run) as partial:
        yield partial
        with writing(target):
            os.replace(partial, target)  # onto nothing, or an empty folder
            (target / OWNER).unlink()


@contextmanager
def unfinished(target: Path, run: str | None = None) -> Iterator[Path]:
    """A folder under a name of its own beside `target`, for what will be there.

    It is removed in the end; with `run`, which names what is written, not after a kill, Ctrl-C, or where memory or disk were
    too small: the next call of the same run goes on in it. What killed processes left of `target` is removed.
    Raises UsageError if `target` holds anything, cannot be written, or another process writes it; DoesNotFitError if the disk
    is full.
    """
    check_free(target)
    if run is not None:
        begin(target)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial, fd = _claim(target, run)
    keep = run is not None
    try:
        yield partial
        keep = False
    except BaseException as e:
        keep = keep and isinstance(e, KeyboardInterrupt | MemoryError | DoesNotFitError | BusyError)
        raise
    finally:
        if not keep:
            discard(partial)  # gone already where it was renamed
        os.close(fd)


def staged(folder: Path) -> list[Path]:
    """The folders of calibrated layers that lowq set down in an output folder: its names, and no links."""
    found = (p for p in folder.glob(STAGED + "*") if p.is_dir() and not p.is_symlink())
    return [p for p in found if re.fullmatch("[0-9a-f]{16}", p.name.removeprefix(STAGED))]


def check_free(target: Path) -> None:
    """Raise UsageError if there is anything at `target`."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise UsageError(f"{target} is there already; use another --out, or remove it")


def check_apart(target: Path, source: Path | None) -> None:
    """Raise UsageError if `target` would lie in the folder that a model is read from."""
    if source is not None and (inside := target.resolve()).is_relative_to(source.resolve()) and inside != source.resolve():
        raise UsageError(f"{target} lies in {source}, the folder of the model itself; use --out with a folder beside it")


def sweep(target: Path) -> None:
    """Remove what a process that was killed around giving `target` its name left, in it and beside it."""
    with writing(target):
        if target.is_dir() and _owner(target / OWNER).get("target") == target.name:
            (target / OWNER).unlink(missing_ok=True)
        for path, _ in left(target):
            with suppress(BusyError, OSError), held(path):
                discard(path)


def _claim(target: Path, run: str | None) -> tuple[Path, int]:
    """The unfinished folder of this run, its own or one that a killed process left, and a descriptor that holds it.

    One process at a time looks around: the parent folder is held meanwhile. Raises OSError, BusyError.
    """
    parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    found: tuple[Path, int] | None = None
    try:
        for _ in range(PATIENCE):  # others look around for milliseconds; who holds the parent for longer writes a run in it
            if _lock(parent) is not False:
                break
            time.sleep(0.01)
        for path, owner in left(target):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            locked, mine = _lock(fd), run is not None and owner.get("run") == run
            if run is not None and locked is False:
                raise BusyError(f"another lowq is writing to {target}; wait for it, or use another --out")
            if mine and not found:
                found = path, fd
                continue
            try:
                if locked or (locked is None and time.time() - path.stat().st_mtime > LEFT):
                    discard(path)
            finally:
                os.close(fd)
        return found or _make(target, run)
    except BaseException:
        if found:
            os.close(found[1])
        raise
    finally:
        os.close(parent)


def _make(target: Path, run: str | None) -> tuple[Path, int]:
    """A new unfinished folder: killed in the midst, an empty one under a name that `left` knows."""
    name = uuid.uuid4().hex[:12]
    partial = target.with_name(f"{target.name}.{name}.partial")
    partial.mkdir()
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    _lock(fd)
    owner = os.open(partial / OWNER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(owner, "w", encoding="utf-8") as f:
        f.write(json.dumps({"id": name, "target": target.name, "run": run}))
    return partial, fd


def left(target: Path) -> list[tuple[Path, dict[str, str]]]:
    """The unfinished folders of `target` that lowq made, and what they say: those of an id, which OWNER repeats, or empty."""
    found = []
    for path in target.parent.iterdir():
        named = re.fullmatch(rf"{re.escape(target.name)}\.([0-9a-f]{{12}})\.partial", path.name)
        if named and stat.S_ISDIR(path.lstat().st_mode):
            owner = _owner(path / OWNER)
            torn = not owner and {p.name for p in path.iterdir()} <= {OWNER} and not _size(path / OWNER)
            if torn or owner.get("id") == named[1]:
                found.append((path, owner))
    return found


def discard(folder: Path) -> None:
    """Remove an unfinished folder, its OWNER last: killed in between, it is still known for lowq's."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda p: p.name == OWNER):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        folder.rmdir()


def _size(path: Path) -> int:
    return path.lstat().st_size if path.is_symlink() or path.exists() else 0


def _owner(path: Path) -> dict[str, str]:
    """What an OWNER file says; {} where it is none, or not a regular file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as f:
            said = json.loads(f.read(1 << 16)) if stat.S_ISREG(os.fstat(f.fileno()).st_mode) else {}
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
