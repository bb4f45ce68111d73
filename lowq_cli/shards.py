"""A new model folder: safetensors files of bounded size, and a name that it only gets when it is whole."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowq_cli.foreign import DTYPES
from lowq_cli.safetensors_io import TensorHeader, build_header
from lowq_cli.source import INDEX, SINGLE
from lowq_cli.writer import writing
from lowq_packers.errors import UsageError

SHARD = 1 << 30  # bytes of a file, and of memory that waits to be written
NAMES = {torch.uint32: "U32"} | {getattr(torch, t): s for s, t in DTYPES.items() if s != "U32"}


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder under a temporary name beside `target`, renamed to it on success and removed on failure.

    Raises UsageError if `target` holds anything, or cannot be written; DoesNotFitError if the disk is full.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; use another --out, or remove it")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with writing(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        with writing(target):
            if target.is_dir():
                target.rmdir()
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already where all went well


class ShardWriter:
    """Safetensors files of at most SHARD bytes, written as they fill and numbered at the end."""

    def __init__(self, folder: Path, kind: str = "pt") -> None:
        self.folder, self.kind = folder, kind
        self.waiting: dict[str, torch.Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []
        self.size = self.total = 0

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
        path = self.folder / f"part-{len(self.files) + 1}.safetensors"
        with writing(path), open(path, "wb") as f:
            f.write(start)
            for name in placed:  # in the order of their bytes
                f.write(self.waiting[name].flatten().view(torch.uint8).numpy().data)
            f.flush()
            os.fsync(f.fileno())
        self.files.append((path, list(self.waiting)))
        self.waiting, self.size = {}, 0

    def finish(self) -> None:
        """Write what waits, give the files their names, and write the index where there are several."""
        self._flush()
        weight_map: dict[str, str] = {}
        for i, (path, names) in enumerate(self.files, 1):
            final = SINGLE if len(self.files) == 1 else f"model-{i:05d}-of-{len(self.files):05d}.safetensors"
            os.replace(path, self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if len(self.files) > 1:
            with writing(self.folder):
                (self.folder / INDEX).write_bytes(to_json({"metadata": {"total_size": self.total}, "weight_map": weight_map}))


def to_json(value: object) -> bytes:
    """A JSON file's content."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
