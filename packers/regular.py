"""Opens files from outside: regular files of bounded size only; anything else is an error of one line.

Reading a FIFO would wait for ever, /dev/zero never ends, and a sparse file of a terabyte takes no disk space. A test allows
other ways of opening a file only where a list names them (tests/test_architecture.py).
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowq_packers.errors import DamagedError, NotFoundError, UsageError

MAX_TEXT = 1 << 28  # max. bytes of tokenizer.json, an index or a report; the tokenizer.json of 256k tokens has 33 MB
MAX_CONFIG = 1 << 25  # max. bytes of a config, chat template or tuning table; a tokenizer_config.json of 256k tokens has 20 MB


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
        raise DamagedError(f"{path} is not a regular file; lowq reads only regular files")
    return fd


def open_bounded(path: Path, most: int) -> int:
    """As `open_regular`; also raises DamagedError for a file of more than `most` bytes."""
    fd = open_regular(path)
    if (size := os.fstat(fd).st_size) > most:
        os.close(fd)
        raise DamagedError(f"{path} has {size} bytes; such a file has at most {most}")
    return fd


def read_regular(path: Path, most: int = MAX_TEXT) -> bytes:
    """The bytes of a regular file of at most `most` bytes. Raises as `open_bounded`."""
    with open(open_bounded(path, most), "rb") as f:
        try:
            return f.read(most)
        except OSError as e:
            raise NotFoundError(f"cannot read {path}: {e.strerror}") from None


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """The text of a regular file. Raises as `read_regular`, and DamagedError where it is not UTF-8."""
    try:
        return read_regular(path, most).decode("utf-8")
    except UnicodeDecodeError as e:
        raise DamagedError(f"{path} is not UTF-8: {e}") from None


def read_given(path: Path, what: str, most: int) -> bytes:
    """The bytes of a file named on the command line; it may be a pipe, as in <(a command), which is read to its end.

    what: what the file holds, for the message. Raises NotFoundError, and UsageError for a device or more than `most` bytes.
    """
    try:
        with open(path, "rb") as f:
            facts = os.fstat(f.fileno())
            if stat.S_ISCHR(facts.st_mode) or stat.S_ISBLK(facts.st_mode):
                raise UsageError(f"cannot read the {what} {path}: it is a device; name a file, or a pipe")
            raw = None if facts.st_size > most else f.read(most + 1)
    except (OSError, ValueError) as e:
        raise NotFoundError(f"cannot read the {what} {path}: {getattr(e, 'strerror', e)}") from None
    if raw is None or len(raw) > most:
        limit = f"{most >> 20} MiB" if most < 1 << 30 else f"{most >> 30} GiB"
        raise UsageError(f"cannot read the {what} {path}: more than {limit}; give less of it")
    return raw


def name_of_open(fd: int, path: Path) -> str:
    """A path of the open file descriptor `fd`, for other code in this process; `path` itself where the system has none."""
    return f"/proc/{os.getpid()}/fd/{fd}" if os.path.exists(f"/proc/self/fd/{fd}") else str(path.resolve())


@contextmanager
def opened(path: Path) -> Iterator[str]:
    """A path of the regular file at `path`, held open, for libraries that open files themselves. Raises as `open_regular`."""
    fd = open_regular(path)
    try:
        yield name_of_open(fd, path)
    finally:
        os.close(fd)
