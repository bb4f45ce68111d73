"""A new model folder: safetensors files of bounded size, and a name that it only gets when it is whole."""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from lowq_cli.files.atomic import writing
from lowq_cli.files.safetensors_io import DTYPES, TensorHeader, build_header, read_header
from lowq_cli.files.source import INDEX, SINGLE
from lowq_packers.errors import DoesNotFitError, UsageError

RUN = "lowq-run"  # what an unfinished folder is a part of
SHARD = 1 << 30  # bytes of a file, and of memory that waits to be written
LEFT = 3600  # seconds without a new file after which a folder that nobody holds is a killed process's
NAMES = {torch.uint32: "U32"} | {getattr(torch, t): s for s, t in DTYPES.items() if s != "U32"}


@contextmanager
def new_folder(target: Path, run: str | None = None) -> Iterator[Path]:
    """A folder under a temporary name beside `target`, renamed to it when it is whole.

    It is removed on failure; with `run`, which names what is written, not after a kill, Ctrl-C, or where memory or disk were
    too small: the next call of the same run goes on in it.
    Raises UsageError if `target` holds anything, cannot be written, or another process writes it; DoesNotFitError if the disk
    is full.
    """
    check_free(target)
    # without a run a name of its own: two threads have one process id, and so may two containers that share a cache
    partial = target.with_name(f"{target.name}.partial" if run else f"{target.name}.{uuid.uuid4().hex[:12]}.partial")
    with writing(target):
        partial.mkdir(parents=True, exist_ok=run is not None)
    lock = os.open(partial, os.O_RDONLY)
    keep = False
    try:
        if run is not None:
            _claim(partial, lock, run)
        else:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sweep(target)
        yield partial
        with writing(target):
            (partial / RUN).unlink(missing_ok=True)
            if target.is_dir():
                target.rmdir()
            os.replace(partial, target)
    except (KeyboardInterrupt, MemoryError, DoesNotFitError, BusyError):
        keep = run is not None
        raise
    finally:
        os.close(lock)
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)  # gone already where all went well


def _sweep(target: Path) -> None:
    """Remove what killed processes left of `target` under names of their own: folders that nobody holds any more."""
    for path in target.parent.glob("*.partial"):
        if re.fullmatch(rf"{re.escape(target.name)}\.[0-9a-f]{{12}}\.partial", path.name):
            with suppress(OSError):  # held, gone meanwhile, or somebody else's
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if time.time() - path.stat().st_mtime > LEFT:  # a younger one may be about to be held
                        shutil.rmtree(path)
                finally:
                    os.close(lock)


def check_free(target: Path) -> None:
    """Raise UsageError if there is anything at `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; use another --out, or remove it")


def _claim(partial: Path, lock: int, run: str) -> None:
    """Keep other processes out of `partial`, and empty it unless it is of this run."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"another lowq is writing to {partial}; wait for it, or use another --out") from None
    except OSError:
        pass  # a file system without locks
    with writing(partial):
        if not (partial / RUN).is_file() or (partial / RUN).read_text() != run:
            for path in partial.iterdir():
                path.unlink()
            (partial / RUN).write_text(run)


class BusyError(UsageError):
    """Another process is at it."""


class ShardWriter:
    """Safetensors files of at most SHARD bytes, written as they fill and numbered at the end.

    Those that an interrupted run left in the folder count: `done` are the tensors in them.
    """

    def __init__(self, folder: Path, kind: str = "pt") -> None:
        self.folder, self.kind = folder, kind
        self.waiting: dict[str, torch.Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []
        self.size = self.total = 0
        while (path := self._part(len(self.files) + 1)).is_file():
            held = read_header(path).tensors
            self.files.append((path, list(held)))
            self.total += sum(h.nbytes for h in held.values())
        self.done = frozenset(name for _, names in self.files for name in names)

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of one matrix; they stay in one file."""
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        if self.waiting and self.size + nbytes > SHARD:
            self._flush()
        self.waiting |= tensors
        self.size += nbytes
        self.total += nbytes

    def _flush(self) -> None:
        headers = [(n, TensorHeader(tuple(t.shape), NAMES[t.dtype])) for n, t in self.waiting.items()]
        start, placed = build_header(headers, self.kind)
        path = self._part(len(self.files) + 1)
        unfinished = path.with_suffix(".tmp")
        with writing(path):
            with open(unfinished, "wb") as f:
                f.write(start)
                for name in placed:  # in the order of their bytes
                    f.write(self.waiting[name].flatten().view(torch.uint8).numpy().data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(unfinished, path)
        self.files.append((path, list(self.waiting)))
        self.waiting, self.size = {}, 0

    def finish(self) -> None:
        """Write what waits, give the files their names, and write the index where there are several."""
        if self.waiting or not self.files:
            self._flush()
        weight_map: dict[str, str] = {}
        for i, (path, names) in enumerate(self.files, 1):
            final = SINGLE if len(self.files) == 1 else f"model-{i:05d}-of-{len(self.files):05d}.safetensors"
            os.replace(path, self.folder / final)
            weight_map |= dict.fromkeys(sorted(names), final)
        if len(self.files) > 1:
            with writing(self.folder):
                (self.folder / INDEX).write_bytes(to_json({"metadata": {"total_size": self.total}, "weight_map": weight_map}))


def to_json(value: object) -> bytes:
    """A JSON file's content."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
