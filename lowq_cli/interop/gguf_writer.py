"""Write a GGUF file in a temporary folder until it is complete; after a kill, writing resumes.

NAME.id.partial/file       the file's first bytes, in order
NAME.id.partial/note.json  the number of complete tensors on disk, updated every `note_bytes`
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lowq_cli.files.folder import unfinished
from lowq_cli.interop.gguf_file import GgufTensor, padded
from lowq_cli.state import remember_export, writing
from lowq_packers.atomic import publish, write_whole
from lowq_packers.errors import LowqError, UsageError
from lowq_packers.regular import read_text


@contextmanager
def new_gguf(out: Path, run: str, head: bytes, note_bytes: int) -> Iterator["GgufWriter"]:
    """A writer of the file `out`, which exists once the block has ended without an error.

    After a kill, Ctrl-C, or a lack of memory or disk space, the partial file is kept for the next call of the same `run`.
    Raises UsageError if `out` exists, cannot be written, or another process writes it; DoesNotFitError if the disk is full.
    """
    with unfinished(out, run) as folder:
        path = folder / "file"
        path.touch()
        with open(path, "r+b") as file:
            yield GgufWriter(path, file, head, note_bytes)
            with writing(out):
                file.flush()
                os.fsync(file.fileno())
                remember_export(out, run, path)  # before the rename, so that a kill in between is harmless
                try:
                    publish(path, out)
                except FileExistsError:
                    raise UsageError(f"{out} is there already; use another --out, or remove it") from None


class GgufWriter:
    """Appends to `file`; `finished` is the number of tensors in it from an earlier run."""

    def __init__(self, path: Path, file: BinaryIO, head: bytes, note_bytes: int) -> None:
        self.note_bytes, self.path, self.note, self.file = note_bytes, path, path.with_name("note.json"), file
        with writing(path):
            self.finished, at = self._left(head)
            file.truncate(at)
            file.seek(at)
            if not at:
                file.write(head)
        self.synced = file.tell()

    def _left(self, head: bytes) -> tuple[int, int]:
        """(tensors, bytes) of an earlier run's partial file; (0, 0) if there is none that fits."""
        try:
            note = json.loads(read_text(self.note))
            finished, at = int(note["tensors"]), int(note["bytes"])
        except (LowqError, ValueError, KeyError, TypeError):
            return 0, 0
        whole = len(head) <= at <= os.fstat(self.file.fileno()).st_size
        return (finished, at) if whole and self.file.read(len(head)) == head else (0, 0)

    def write(self, row: GgufTensor, parts: Iterable[memoryview]) -> None:
        """The next tensor."""
        with writing(self.path):
            start = self.file.tell()
            for part in parts:
                self.file.write(part)
            assert self.file.tell() - start == row.nbytes, row.name
            self.file.write(bytes(padded(row.nbytes) - row.nbytes))
            self.finished += 1
            if self.file.tell() - self.synced >= self.note_bytes:
                self.file.flush()
                os.fsync(self.file.fileno())
                self.synced = self.file.tell()
                write_whole(self.note, json.dumps({"tensors": self.finished, "bytes": self.synced}).encode())
