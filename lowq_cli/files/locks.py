"""Locks of folders and files, which end with the process that holds them: take one, and ask who holds one."""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path


def lock(fd: int) -> bool | None:
    """Whether this process now holds the lock; None if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def holder(folder: Path) -> int | None:
    """The id of the process that holds the lock of a folder or file; None if there is none, or the system does not tell."""
    with suppress(OSError):
        status, locks = folder.stat(), Path("/proc/locks").read_text()
        at = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
        line = re.search(rf"^\d+: FLOCK +ADVISORY +WRITE +([1-9]\d*) {at}", locks, re.MULTILINE)
        return int(line[1]) if line else None
    return None


def is_held(folder: Path) -> bool:
    """Whether another process holds the lock of a folder or file; False if it does not exist."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return lock(fd) is False
    finally:
        os.close(fd)
