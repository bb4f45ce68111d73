"""Read the head of a GGUF file: its metadata and its table of tensors. Counts, strings and spans are checked before use."""

import os
import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lowq_cli.files.safetensors_io import read_bytes
from lowq_cli.interop.gguf_file import ALIGNMENT, ARRAY, BOOL, MAGIC, STRING
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats.gguf import TYPES
from lowq_packers.regular import open_regular

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
MAX_HEAD = 1 << 28  # max. bytes of metadata and tensor table; a vocabulary of 256k tokens takes 10 MB
MAX_COUNT = 1 << 22
MAX_NAME = 64  # max. characters of a tensor's name; ggml's limit
KNOWN = {t.number: t.name for t in TYPES.values()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a GGUF file: shape (N, K) or (N,), type, and absolute position."""

    shape: tuple[int, ...]
    kind: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) // TYPES[self.kind].elements * TYPES[self.kind].nbytes


class _Reader:
    """Read values from the start of a file; each is checked against the number of remaining bytes."""

    def __init__(self, raw: bytes, where: str) -> None:
        self.raw, self.where, self.at = raw, where, 0

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.raw):
            raise DamagedError(f"{self.where} ends inside its header: truncated, or not a GGUF file; fetch it again")
        self.at += n
        return self.raw[self.at - n : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str) -> int:
        n = self.number("<Q")
        if n > MAX_COUNT:
            raise DamagedError(f"{self.where} says it has {n} {what}; fetch it again")
        return n

    def string(self) -> str:
        return self.take(self.count("characters")).decode("utf-8", "replace")

    def name(self) -> str:
        text = self.string()
        if len(text) > MAX_NAME or not text.isprintable():
            raise DamagedError(f"{self.where} has a tensor of the name {text[:MAX_NAME]!r}; fetch it again")
        return text

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and not nested:
            of, n = self.number("<I"), self.count("values")
            return [self.value(of, True) for _ in range(n)]
        if kind not in SCALARS:
            raise DamagedError(f"{self.where} has metadata of the unknown type {kind}")
        return bool(self.number(SCALARS[kind])) if kind == BOOL else self.number(SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Entry], int]:
    """Metadata, tensors and the CRC-32 of a file's head. Raises NotFoundError, DamagedError, UnsupportedError."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        raw = bytes(read_bytes(fd, 0, min(size, MAX_HEAD), str(path)))
    finally:
        os.close(fd)
    r = _Reader(raw, str(path))
    if r.take(4) != MAGIC:
        raise DamagedError(f"{path} is not a GGUF file; fetch it again")
    if (version := r.number("<I")) not in (2, 3):
        raise UnsupportedError(f"{path} is GGUF version {version}; lowq reads 2 and 3")
    tensor_count, pair_count = r.count("tensors"), r.count("metadata values")
    metadata = {}
    for _ in range(pair_count):
        key = r.string()
        if key in metadata:
            raise DamagedError(f"{path} says {key[:MAX_NAME]!r} twice; fetch it again")
        metadata[key] = r.value(r.number("<I"))
    rows = [_row(r) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise DamagedError(f"{path} has the alignment {alignment!r}")
    start = -(-r.at // alignment) * alignment
    tensors = {name: Entry(shape, kind, start + at) for name, shape, kind, at in rows}
    if len(tensors) != len(rows):
        raise DamagedError(f"{path} has two tensors of one name")
    end = start
    for name, t in sorted(tensors.items(), key=lambda item: item[1].offset):
        if t.offset < end or t.offset + t.nbytes > size:
            raise DamagedError(f"{path}: {name} lies at {t.offset}, over another tensor or beyond the end; fetch it again")
        end = t.offset + t.nbytes
    return metadata, tensors, zlib.crc32(raw[: r.at])


def _row(r: _Reader) -> tuple[str, tuple[int, ...], str, int]:
    name, dims = r.name(), r.number("<I")
    if not 1 <= dims <= 4:
        raise DamagedError(f"{r.where}: {name} has {dims} dimensions")
    shape = tuple(reversed([r.number("<Q") for _ in range(dims)]))
    number, at = r.number("<I"), r.number("<Q")
    if number not in KNOWN:
        raise UnsupportedError(f"{r.where}: {name} has the GGUF type {number}; lowq reads {', '.join(TYPES)}: take such a file")
    kind = TYPES[KNOWN[number]]
    if not all(0 < d < 1 << 40 for d in shape) or shape[-1] % kind.elements or dims == 1 < kind.elements:
        raise DamagedError(f"{r.where}: {name} is {kind.name} of the shape {list(shape)}, which is not rows of whole blocks")
    return name, shape, kind.name, at
