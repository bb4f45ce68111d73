"""A GGUF file while it is written: under a temporary name until it is whole, and gone on with after a kill.

NAME.partial        the file's first bytes, in order
NAME.partial.json   the run it belongs to, and how many tensors are whole and on disk, every SHARD bytes
"""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from lowq_cli.files import shards
from lowq_cli.files.atomic import writing
from lowq_cli.files.shards import BusyError
from lowq_cli.interop.gguf_file import GgufTensor, finish_tensor
from lowq_packers.errors import DoesNotFitError, UsageError


class GgufWriter:
    """The file `out` in the making; `finished` are the tensors that an earlier run of the same name left in it.

    Kept after a kill, Ctrl-C, or where memory or disk were too small; removed on other failures.
    Raises UsageError if `out` is there, cannot be written, or another process writes it; DoesNotFitError if the disk is full.
    """

    def __init__(self, out: Path, run: str, head: bytes) -> None:
        if out.exists():
            raise UsageError(f"{out} is there already; use another --out, or remove it")
        self.out, self.run, self.head = out, run, head
        self.partial, self.note = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.partial.json")
        self.finished = 0

    def __enter__(self) -> "GgufWriter":
        with writing(self.partial):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.partial, "r+b" if self.partial.exists() else "w+b")  # closed in __exit__
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise BusyError(f"another lowq is writing {self.out}; wait for it, or use another --out") from None
        except OSError:
            pass  # a file system without locks
        self.finished, at = self._left()
        with writing(self.partial):
            self.file.truncate(at)
            self.file.seek(at)
            if not at:
                self.file.write(self.head)
        self.synced = self.file.tell()
        return self

    def _left(self) -> tuple[int, int]:
        """(tensors, bytes) that an earlier run left; (0, 0) where there is nothing of this run."""
        try:
            note = json.loads(self.note.read_bytes())
            finished, at = int(note["tensors"]), int(note["bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0
        same = note.get("run") == self.run and len(self.head) <= at <= os.fstat(self.file.fileno()).st_size
        return (finished, at) if same and self.file.read(len(self.head)) == self.head else (0, 0)

    def write(self, row: GgufTensor, parts: Iterable[memoryview]) -> None:
        """The next tensor."""
        with writing(self.partial):
            start = self.file.tell()
            for part in parts:
                self.file.write(part)
            finish_tensor(self.file, row, self.file.tell() - start)
            self.finished += 1
            if self.file.tell() - self.synced >= shards.SHARD:
                self._sync()

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.synced = self.file.tell()
        unfinished = self.note.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"run": self.run, "tensors": self.finished, "bytes": self.synced}))
        os.replace(unfinished, self.note)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                with writing(self.out):
                    self.file.flush()
                    os.fsync(self.file.fileno())
                    os.replace(self.partial, self.out)
        finally:
            self.file.close()
            if not isinstance(error, KeyboardInterrupt | MemoryError | DoesNotFitError):
                self.partial.unlink(missing_ok=True)  # gone already where all went well
                self.note.unlink(missing_ok=True)
