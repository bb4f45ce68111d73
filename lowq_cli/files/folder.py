"""A new folder that is complete or absent: it is made under a temporary name, locked by one process, resumable after a kill.

Its name contains a random id; the file OWNER in it repeats the id and names the target. A folder without a matching OWNER
was not made by lowq and is never changed.
"""

import glob
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

from lowq_cli.console import size
from lowq_cli.files.locks import holder, is_held, lock
from lowq_cli.files.source import STAGED
from lowq_cli.state import OWNER, another_place, begin, is_cached, writing
from lowq_packers.errors import DoesNotFitError, UsageError

PATIENCE = 100  # retries, 10 ms apart, to lock the parent folder
LEFT = 3600  # on a file system without locks: seconds without a new file after which a folder's process is considered dead


class BusyError(UsageError):
    """Another process holds the folder `held`."""

    def __init__(self, message: str, held: Path | None = None) -> None:
        super().__init__(message)
        self.held = held


def busy(path: Path, locked: Path | None = None) -> BusyError:
    """The error of a path that another process writes; commands that write it into the cache have no --out for it.

    locked: the folder whose lock that process has, if it is not `path`.
    """
    process = holder(locked or path)
    who = "" if process is None else f" (process {process})"
    way_out = "wait for it" if is_cached(path) else "wait for it, or use another --out"
    return BusyError(f"another lowq is writing to {path}{who}; {way_out}", locked or path)


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Lock `folder` and return it as a file descriptor (file systems without locks give no guarantee).

    Raises BusyError at once if another process holds it; what a command only needs from the cache it waits for (`waiting`).
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if lock(fd) is False:
            raise busy(folder)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def new_folder(target: Path, run: str | None = None) -> Iterator[Path]:
    """An `unfinished` folder next to `target`, renamed to `target` when it is complete. Raises as `unfinished`."""
    with unfinished(target, run) as partial:
        yield partial
        with writing(target):
            os.replace(partial, target)  # the target is absent or an empty folder
            (target / OWNER).unlink()


@contextmanager
def unfinished(target: Path, run: str | None = None) -> Iterator[Path]:
    """A folder with a temporary name next to `target`, for the future contents of `target`.

    It is removed in the end. With `run`, the name of the run, it stays after a kill, Ctrl-C, or a lack of memory or disk space,
    and the next call of the same run continues in it. Unfinished folders of killed processes for `target` are removed.
    Raises UsageError if `target` is not empty, cannot be written, or another process writes it; DoesNotFitError if the disk
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
            discard(partial)  # already gone if it was renamed
        os.close(fd)


def staged(folder: Path) -> list[Path]:
    """The folders of calibrated layers in an output folder: those with lowq's names that are not links."""
    folders = (p for p in folder.glob(STAGED + "*") if p.is_dir() and not p.is_symlink())
    return [p for p in folders if re.fullmatch("[0-9a-f]{16}", p.name.removeprefix(STAGED))]


def check_free(target: Path) -> None:
    """Raise UsageError if `target` exists."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise UsageError(f"{target} is there already; use another --out, or remove it")


def check_apart(target: Path, source: Path | None) -> None:
    """Raise UsageError if `target` is inside the folder that a model is read from."""
    if source is not None and (inside := target.resolve()).is_relative_to(source.resolve()) and inside != source.resolve():
        raise UsageError(f"{target} lies in {source}, the folder of the model itself; use --out with a folder outside of it")


def free_bytes(out: Path) -> int | None:
    """Free bytes of the disk on which `out` is or will be; None where its file system does not say, as some of a network."""
    usage = shutil.disk_usage(_nearest(out))
    return usage.free if usage.total else None


def _nearest(path: Path) -> Path:
    """The folder, itself or the first one above it, that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def check_room(nbytes: int, out: Path, fewer: str = "", free: int | None = None) -> None:
    """Raise DoesNotFitError if `out` needs more bytes than its disk has free, before the work that makes them.

    fewer: what else than room helps, such as "use fewer bits". free: the free bytes, if they are known.
    """
    free = free_bytes(out) if free is None else free
    if free is not None and nbytes > free:
        ways = ", ".join(filter(None, ("make room", fewer)))
        raise DoesNotFitError(f"needs {size(nbytes)} of disk, {out} has {size(free)} free; {ways}, or {another_place(out)}")


def check_copies(copies: int, nbytes: int, cached: Path, out: Path) -> None:
    """As `check_room`, for work that keeps `copies` of a file of `nbytes` in the cache at a time and then writes it to `out`.

    cached: the beginning of the paths of these copies, of which an interrupted run left some.
    """
    there = sum(map(_tree_bytes, cached.parent.glob(f"{glob.escape(cached.name)}*"))) if cached.parent.is_dir() else 0
    together = on_one_disk(cached, out)
    check_room(copies * nbytes - there, out if together else cached)
    if not together:
        check_room(nbytes - unfinished_bytes(out), out)


def on_one_disk(one: Path, other: Path) -> bool:
    """Whether what is written at the one place leaves less room at the other."""
    return _nearest(one).stat().st_dev == _nearest(other).stat().st_dev


def unfinished_bytes(target: Path) -> int:
    """Bytes on disk of interrupted writes of `target`, which the next one continues or removes."""
    return sum(_tree_bytes(path) for path, _ in left(target)) if target.parent.is_dir() else 0


def _tree_bytes(folder: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in folder.rglob("*"))


def sweep(target: Path) -> None:
    """Remove files in and next to `target` from a process that was killed while renaming it."""
    with writing(target):
        if target.is_dir() and _owner(target / OWNER).get("target") == target.name:
            (target / OWNER).unlink(missing_ok=True)
        for path, _ in left(target):
            with suppress(BusyError, OSError), held(path):
                discard(path)


def _claim(target: Path, run: str | None) -> tuple[Path, int]:
    """The unfinished folder of this run, new or left by a killed process, and a descriptor that holds its lock.

    The parent folder is locked meanwhile, so only one process searches at a time. Raises OSError, BusyError.
    """
    parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    claim: tuple[Path, int] | None = None
    try:
        for _ in range(PATIENCE):  # a search takes milliseconds; a process holding the parent longer writes a run in it
            if lock(parent) is not False:
                break
            time.sleep(0.01)
        for path, owner in left(target):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            locked, mine = lock(fd), run is not None and owner.get("run") == run
            if run is not None and locked is False:
                raise busy(target, path)
            if mine and not claim:
                claim = path, fd
                continue
            try:
                if locked or (locked is None and time.time() - path.stat().st_mtime > LEFT):
                    discard(path)
            finally:
                os.close(fd)
        return claim or _make(target, run)
    except BaseException:
        if claim:
            os.close(claim[1])
        raise
    finally:
        os.close(parent)


def _make(target: Path, run: str | None) -> tuple[Path, int]:
    """Make a new unfinished folder; after a kill in between, `left` finds the empty folder by its name."""
    name = uuid.uuid4().hex[:12]
    partial = target.with_name(f"{target.name}.{name}.partial")
    partial.mkdir()
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    lock(fd)
    owner = os.open(partial / OWNER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with open(owner, "w", encoding="utf-8") as f:
        f.write(json.dumps({"id": name, "target": target.name, "run": run}))
    return partial, fd


def left(target: Path) -> list[tuple[Path, dict[str, str]]]:
    """lowq's unfinished folders of `target` with their OWNER data: folders whose OWNER repeats their id, or empty ones."""
    folders = []
    for path in target.parent.iterdir():
        named = re.fullmatch(rf"{re.escape(target.name)}\.([0-9a-f]{{12}})\.partial", path.name)
        if named and stat.S_ISDIR(path.lstat().st_mode):
            owner = _owner(path / OWNER)
            torn = not owner and {p.name for p in path.iterdir()} <= {OWNER} and not _size(path / OWNER)
            if torn or owner.get("id") == named[1]:
                folders.append((path, owner))
    return folders


def being_written(target: Path) -> list[Path]:
    """The unfinished folders of `target` that other processes are writing."""
    return [path for path, _ in left(target) if is_held(path)] if target.parent.is_dir() else []


def discard(folder: Path) -> None:
    """Remove an unfinished folder, OWNER last: after a kill in between, the folder is still recognised as lowq's."""
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
    """The contents of an OWNER file; {} if it is not a valid one or not a regular file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as f:
            owner = json.loads(f.read(1 << 16)) if stat.S_ISREG(os.fstat(f.fileno()).st_mode) else {}
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}
