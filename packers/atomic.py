"""A file that is whole or not there: made under another name beside its place, and renamed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, made: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """A name beside `path`, of the same suffix, that the block writes to; then renamed to `path`, or removed on failure.

    made: the name, where no other process is at it, so that what a killed one left is written over. sync: on disk before
    it is renamed. Raises OSError.
    """
    made = made or path.with_name(f".{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        yield made
        if sync:
            fd = os.open(made, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        os.replace(made, path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a whole file, in a folder that is made if it is not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as made:
        made.write_bytes(content)
