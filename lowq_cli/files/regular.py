"""Reading a small file that somebody else made: a regular one, of bounded size, or one line that says what it is instead.

A FIFO would wait for ever, /dev/zero never end, and a sparse file of a terabyte takes no disk at all.
"""

import os
import stat
from pathlib import Path

from lowq_packers.errors import DamagedError, NotFoundError

MAX_TEXT = 1 << 28  # bytes of a JSON file or template; tokenizer.json of 256k tokens takes 33 MB


def open_regular(path: Path) -> int:
    """A descriptor of the regular file at `path`. Raises NotFoundError, or DamagedError for anything but a regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise NotFoundError(f"cannot read {path}: {getattr(e, 'strerror', e)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedError(f"{path} is no regular file, and nothing else is read")
    return fd


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file of at most MAX_TEXT bytes. Raises as `open_regular`, and DamagedError for a larger one."""
    with open(open_regular(path), "rb") as f:
        if (size := os.fstat(f.fileno()).st_size) > MAX_TEXT:
            raise DamagedError(f"{path} has {size} bytes; such a file has at most {MAX_TEXT}")
        try:
            return f.read(MAX_TEXT)
        except OSError as e:
            raise NotFoundError(f"cannot read {path}: {e.strerror}") from None


def read_text(path: Path) -> str:
    """The text of a regular file. Raises as `read_regular`, and DamagedError where it is not UTF-8."""
    try:
        return read_regular(path).decode("utf-8")
    except UnicodeDecodeError as e:
        raise DamagedError(f"{path} is not UTF-8: {e}") from None
