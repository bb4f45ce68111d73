"""Writing bytes: all of them, at a place that is reserved, or an error that names the way out."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from lowq_cli import state
from lowq_packers.errors import UsageError, disk_full

NO_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def reserve(fd: int, size: int) -> None:
    """Give a file its full size, and its disk blocks where the file system can, so that a full disk shows now."""
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


def publish(made: Path, path: Path) -> None:
    """Give a whole file its name; another that has come there meanwhile stays. Raises UsageError for that, and OSError."""
    try:
        os.link(made, path)
    except FileExistsError:
        raise UsageError(f"{path} is there already; use another --out, or remove it") from None
    except OSError:  # a file system without hard links
        os.replace(made, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into errors that say the way out."""
    try:
        yield
    except OSError as e:
        if full := disk_full(e, path):
            raise full from e
        cached = state.is_cached(path)
        way_out = "name another cache folder: XDG_CACHE_HOME=DIR" if cached else "use another --out"
        raise UsageError(f"cannot write to {path}: {e.strerror}; {way_out}") from e
