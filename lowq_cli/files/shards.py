"""Weight files of bounded size, written as they fill, without knowing beforehand how many there will be."""

import json
import os
from pathlib import Path

import torch

from lowq_cli.files.atomic import writing
from lowq_cli.files.safetensors_io import DTYPES, TensorHeader, build_header, read_header
from lowq_cli.files.source import INDEX, SINGLE
from lowq_packers.atomic import replacing

SHARD = 1 << 30  # bytes of a file, and of memory that waits to be written
NAMES = {torch.uint32: "U32"} | {getattr(torch, t): s for s, t in DTYPES.items() if s != "U32"}


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
        with writing(path), replacing(path, path.with_suffix(".tmp"), sync=True) as made, open(made, "wb") as f:
            f.write(start)
            for name in placed:  # in the order of their bytes
                f.write(self.waiting[name].flatten().view(torch.uint8).numpy().data)
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
