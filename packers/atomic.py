"""Files that are complete or absent: written under another name in the same folder, then renamed. Files of reserved size."""

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@contextmanager
def replacing(path: Path, partial: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary name next to `path`, with its suffix; renamed to `path` after the block, or removed on failure.

    partial: the temporary name, if no other process uses it. A file that a killed process left under that name is first
    removed, so that nothing is written through a link. sync: flush to disk before the rename. Raises OSError.
    """
    fd = -1
    if partial is None:
        sweep(path)
        partial, fd = _own(path)
    else:
        partial.unlink(missing_ok=True)
    try:
        yield partial
        if sync:
            synced = os.open(partial, os.O_RDONLY)
            try:
                os.fsync(synced)
            finally:
                os.close(synced)
        os.replace(partial, path)
    except BaseException as e:
        partial.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.errno is not None and e.filename is None:  # as of a write to a full disk
            e.filename = str(path)
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def write_whole(path: Path, content: bytes) -> None:
    """Write a whole file; creates its folder. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(content)


def write_new(path: Path, content: bytes) -> None:
    """As `write_whole`, but never overwrites. Raises FileExistsError, OSError."""
    sweep(path)
    partial, fd = _own(path)
    try:
        partial.write_bytes(content)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        os.close(fd)


def publish(partial: Path, path: Path) -> None:
    """Add the name `path` to a finished file; never overwrites. Raises FileExistsError, OSError."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(partial, path)


def reserve(fd: int, size: int) -> None:
    """Reserve a file's full size, and its disk blocks if the file system can, so that a full disk fails at the start."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # macOS
        os.ftruncate(fd, size)
    except OSError as e:
        if e.errno not in NO_RESERVE:
            raise
        os.ftruncate(fd, size)


def write_at(fd: int, content: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of `content` at `offset`."""
    view = memoryview(content).cast("B")
    at = 0
    while at < len(view):
        at += os.pwrite(fd, view[at : at + (1 << 30)], offset + at)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock `folder` so that one process at a time reads and rewrites its file; otherwise one could lose another's additions.

    Waits for other processes, for milliseconds. Without effect if the file system has no locks or the folder does not exist.
    """
    fd = -1
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


@contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder `name`-... in `parent`, deleted after the block; folders that killed processes left are deleted first.

    Raises OSError.
    """
    _remove_left(parent, rf"{re.escape(name)}-[0-9a-f]{{12}}", _own_tree)
    while True:
        folder = parent / f"{name}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(0o700)
        with suppress(OSError):  # a file system without locks, or another process has just swept it away
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if folder.is_dir():
                break
            os.close(fd)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _own(path: Path) -> tuple[Path, int]:
    """A new empty file in the folder of `path`, and a locked descriptor of it, which another process's `sweep` respects."""
    while True:
        partial = path.with_name(f".{uuid.uuid4().hex[:12]}-{path.name}")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
        with suppress(OSError):  # a file system without locks, or another process's `sweep` has the lock
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return partial, fd
        os.close(fd)


def sweep(path: Path) -> None:
    """Remove temporary files that killed processes left from earlier writes of `path`, whose folder exists."""
    _remove_left(path.parent, _temporary(path), Path.unlink)


def unfinished(path: Path) -> set[Path]:
    """The temporary files of writes of `path`, whose folder exists: of killed processes, and of those that write now."""
    return {p for p in path.parent.iterdir() if re.fullmatch(_temporary(path), p.name)}


def _temporary(path: Path) -> str:
    return rf"\.[0-9a-f]{{12}}-{re.escape(path.name)}"


def _own_tree(folder: Path) -> None:
    if folder.lstat().st_uid == os.getuid():
        shutil.rmtree(folder)


def _remove_left(parent: Path, names: str, remove: Callable[[Path], None]) -> None:
    """Remove files in `parent` with such a name that no process has locked: those of killed processes."""
    for left in parent.iterdir():
        if re.fullmatch(names, left.name):
            with suppress(OSError):  # deleted meanwhile, locked, or another user's
                fd = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(left)
                finally:
                    os.close(fd)
