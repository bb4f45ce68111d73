"""Write weight files of bounded size as they fill, without knowing their number in advance."""

from __future__ import annotations

import json
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lowq_cli.files.safetensors_io import DTYPES, TensorHeader, build_header, read_header
from lowq_cli.files.source import shard_name
from lowq_cli.files.weight_files import INDEX
from lowq_cli.state import writing
from lowq_packers.atomic import replacing
from lowq_packers.lazy import torch

SHARD = 1 << 29  # max. bytes of a file, and of the tensors in memory that wait for it
WRITERS = 2  # files written at once while the next one fills; one thread per file limits the speed, then the disk
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}


def name_of(t: torch.Tensor) -> str:
    """The safetensors name of a tensor's dtype."""
    return NAMES[str(t.dtype).removeprefix("torch.")]


class SafetensorsWriter:
    """Safetensors files of at most `file_bytes`, written as they fill and numbered at the end.

    Files of an interrupted run in the folder are reused: `done` are the tensors in them. Leaving the block waits for
    all files that are still being written.
    """

    def __init__(self, folder: Path, kind: str = "pt", file_bytes: int = SHARD) -> None:
        self.folder, self.kind, self.file_bytes = folder, kind, file_bytes
        self.waiting: dict[str, torch.Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []
        self.size = self.total = 0
        self._pool, self._pending = ThreadPoolExecutor(WRITERS), deque[Future[None]]()
        while (path := self._part(len(self.files) + 1)).is_file():
            tensors = read_header(path).tensors
            self.files.append((path, list(tensors)))
            self.total += sum(h.nbytes for h in tensors.values())
        self.done = frozenset(name for _, names in self.files for name in names)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Add the tensors of one matrix; they go into one file."""
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        if self.waiting and self.size + nbytes > self.file_bytes:
            self._flush()
        self.waiting |= tensors
        self.size += nbytes
        self.total += nbytes

    def _flush(self) -> None:
        if len(self._pending) == WRITERS:
            self._pending.popleft().result()
        path = self._part(len(self.files) + 1)
        self._pending.append(self._pool.submit(_write, path, self.waiting, self.kind))
        self.files.append((path, list(self.waiting)))
        self.waiting, self.size = {}, 0

    def finish(self) -> None:
        """Write the remaining tensors, rename the files, and write the index if there are several files."""
        if self.waiting or not self.files:
            self._flush()
        for written in self._pending:
            written.result()
        weight_map: dict[str, str] = {}
        for i, (path, names) in enumerate(self.files, 1):
            final = shard_name(i, len(self.files))
            os.replace(path, self.folder / final)
            weight_map |= dict.fromkeys(sorted(names), final)
        if len(self.files) > 1:
            with writing(self.folder):
                (self.folder / INDEX).write_bytes(to_json({"metadata": {"total_size": self.total}, "weight_map": weight_map}))


def _write(path: Path, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """Write one file, flush it to disk, then rename it."""
    start, placed = build_header([(n, TensorHeader(tuple(t.shape), name_of(t))) for n, t in tensors.items()], kind)
    with writing(path), replacing(path, path.with_suffix(".tmp"), sync=True) as partial, open(partial, "wb") as f:
        f.write(start)
        for name in placed:  # in the order of their positions
            f.write(tensors[name].flatten().view(torch.uint8).numpy().data)


def to_json(value: object) -> bytes:
    """The content of a JSON file. Bytes of a path that are not UTF-8 become escapes, which JSON readers turn back."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
