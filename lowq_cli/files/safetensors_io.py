"""Safetensors files: check headers before use, read bytes into private memory, write headers.

The file is 8 bytes (header length, little endian), a JSON object name -> {dtype, shape, data_offsets}, then the data. A
header is accepted only if its tensors tile the data exactly: no gap, no overlap, no byte missing. Reading copies instead
of mapping, because mapped pages count as resident memory: a 70B model would appear to need 140 GB.
"""

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from lowq_packers.errors import DamagedError, NotFoundError, UnsupportedError
from lowq_packers.regular import MAX_TEXT, open_regular, read_regular

if TYPE_CHECKING:  # a dry run and `lowq --help` do not import torch
    import torch

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_NAME, MAX_DIMS = 1000, 64  # max. characters of a tensor's name; max. dimensions, torch's limit
LFS_POINTER = b"version "  # the first 8 bytes of the pointer file that `git clone` writes without git-lfs
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of weights that are not packed
E4M3 = "F8_E4M3"  # the dtype of fp8 matmuls; such a tensor is a weight only together with its block scales
DTYPES = {  # safetensors name -> torch name, of all dtypes that other tools' formats store
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
TORCH_NAMES = {name: DTYPES[name] for name in ("F64", "F32", "F16", "BF16", "I32", "U8")}  # dtypes that lowq computes with
ST_NAMES = {v: k for k, v in TORCH_NAMES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """Shape, dtype (safetensors name, such as "BF16") and absolute position in its file of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class FileHeader:
    """One safetensors file: its tensors in the order of their bytes, its size, and the CRC-32 of its header."""

    path: Path
    tensors: dict[str, TensorHeader]
    size: int
    crc: int


def read_header(path: Path) -> FileHeader:
    """The checked header of a safetensors file. Raises NotFoundError, or DamagedError with the defect."""
    with open(open_regular(path), "rb") as f:
        try:
            size = os.fstat(f.fileno()).st_size
            prefix = f.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == LFS_POINTER:
                raise DamagedError(f"{path} is a Git LFS pointer, not the weights themselves; fetch those with: git lfs pull")
            if len(prefix) < 8:
                raise DamagedError(f"{path} is {size} bytes long, too short for a safetensors file; fetch it again")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise DamagedError(
                    f"{path} says its header has {length} bytes; it must have 2 to {min(MAX_HEADER, size - 8)}: "
                    f"truncated, or not a safetensors file; fetch it again"
                )
            raw = f.read(length)
        except OSError as e:
            raise NotFoundError(f"cannot read {path}: {e.strerror}") from None
    tensors = parse_header(raw, size - 8 - length, 8 + length, str(path))
    return FileHeader(path, tensors, size, zlib.crc32(prefix + raw))


def parse_header(raw: bytes, data_bytes: int, data_start: int, where: str) -> dict[str, TensorHeader]:
    """Name -> header from the JSON of a safetensors header, checked against the `data_bytes` that follow it.

    Raises DamagedError (malformed, unknown dtype, bytes that do not tile the data) with `where` in the message.
    """
    table = parse_json(raw, where, once=True)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{where}: __metadata__ must be a table of strings")
    tensors, spans = {}, []
    for name, entry in table.items():
        dtype, shape, begin, end = _entry(name, entry, where)
        header = TensorHeader(shape, dtype, data_start + begin)
        if end - begin != header.nbytes:
            raise DamagedError(f"{where}: {name} is {dtype} {list(shape)} = {header.nbytes} bytes but has {end - begin}")
        tensors[name] = header
        spans.append((begin, end, name))
    spans.sort()
    for (_, end, name), (begin, _, following) in pairwise(spans):
        if begin != end:
            fault = "overlaps" if begin < end else "leaves a gap before"
            raise DamagedError(f"{where}: {name} ends at byte {end} and {fault} {following}, which starts at {begin}")
    first, last = (spans[0][0], spans[-1][1]) if spans else (0, 0)
    if first != 0 or last != data_bytes:
        raise DamagedError(
            f"{where}: the header describes bytes {first} to {last} after it, the file holds {data_bytes}: truncated or padded"
        )
    return {name: tensors[name] for _, _, name in spans}


def _entry(name: str, entry: object, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one header entry. Raises DamagedError."""

    def whole(values: object) -> bool:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{where}: {name} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise DamagedError(f"{where}: {name} has dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
    if len(name) > MAX_NAME:
        raise DamagedError(f"{where}: a tensor's name has {len(name)} characters; {MAX_NAME} are the most")
    sound = whole(shape) and len(shape) <= MAX_DIMS and (0 not in shape or prod(d or 1 for d in shape) < 1 << 62)
    if not sound or not whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        spelled = f"shape {str(shape)[:200]} and data_offsets {str(offsets)[:200]}"
        raise DamagedError(f"{where}: {name} has {spelled}, which are impossible")
    return dtype, tuple(shape), offsets[0], offsets[1]


def parse_json(raw: bytes, where: str, once: bool = False) -> dict:
    """Parse a JSON object. Raises DamagedError on bad UTF-8, bad JSON, another JSON type, and with `once` on duplicate keys."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        table = dict(pairs)
        if once and len(table) != len(pairs):
            twice = Counter(k for k, _ in pairs).most_common(1)[0][0]
            raise DamagedError(f"{where}: {twice!r} occurs twice")
        return table

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if re.search(rb"\\u[dD][89a-fA-F]", raw):  # half a surrogate pair has no UTF-8 encoding: it cannot be printed
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise DamagedError(f"{where} does not hold valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise DamagedError(f"{where} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_json(path: Path, most: int = MAX_TEXT) -> dict:
    """The JSON object in a file of at most `most` bytes. Raises NotFoundError or DamagedError."""
    return parse_json(read_regular(path, most), str(path))


def build_header(tensors: Iterable[tuple[str, TensorHeader]], kind: str = "pt") -> tuple[bytes, dict[str, TensorHeader]]:
    """The header bytes of a file with these tensors (`kind`: the metadata's format), and the position of each tensor.

    Wider elements come first, so that every tensor is aligned to its element without gaps (readers view bytes in place).
    """
    ordered = sorted(tensors, key=lambda item: -ITEMSIZE[item[1].dtype])
    table: dict[str, object] = {"__metadata__": {"format": kind}}
    at, spans = 0, {}
    for name, t in ordered:
        table[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        spans[name] = at
        at += t.nbytes
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    placed = {name: TensorHeader(t.shape, t.dtype, start + spans[name]) for name, t in ordered}
    return len(raw).to_bytes(8, "little") + raw, placed


def read_bytes(fd: int, offset: int, nbytes: int, where: str) -> bytearray:
    """`nbytes` bytes at `offset`, in new memory. Raises DamagedError if the file is too short."""
    buffer = bytearray(nbytes)
    read_into(memoryview(buffer), fd, offset, where)
    return buffer


def read_into(view: memoryview, fd: int, offset: int, where: str) -> None:
    """Fill `view` with the file's bytes from `offset` on. Raises DamagedError if the file is too short."""
    at = 0
    while at < len(view):
        count = os.preadv(fd, [view[at : at + (1 << 30)]], offset + at)
        if count == 0:
            raise DamagedError(f"{where} ended {len(view) - at} bytes early; it changed while being read")
        at += count


def as_tensor(buffer: bytearray, dtype: str, shape: tuple[int, ...]) -> "torch.Tensor":
    """The bytes as a tensor of a safetensors dtype, without a copy. Raises UnsupportedError for dtypes not in TORCH_NAMES."""
    torch_dtype(dtype)
    return viewed(buffer, DTYPES[dtype], shape)


def viewed(buffer: bytearray, name: str, shape: tuple[int, ...]) -> "torch.Tensor":
    """The bytes as a tensor of the torch dtype of that name, without a copy."""
    import torch

    dtype = getattr(torch, name)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape) if buffer else torch.empty(shape, dtype=dtype)


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a safetensors one, such as "BF16". Raises UnsupportedError for dtypes not in TORCH_NAMES."""
    import torch

    if name not in TORCH_NAMES and name != E4M3:
        raise UnsupportedError(f"lowq computes with {', '.join(TORCH_NAMES)}, not with {name}")
    return getattr(torch, DTYPES[name])


def check_file_name(name: str, where: str) -> str:
    """`name` if it is a bare file name. Raises DamagedError: an index must not point outside its folder."""
    if not isinstance(name, str) or not name or Path(name).name != name or name in (".", ".."):
        raise DamagedError(f"{where} names the file {name!r}; only files in the same folder are allowed")
    return name
