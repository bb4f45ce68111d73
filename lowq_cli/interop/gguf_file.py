"""The GGUF container: magic, version 3, metadata, tensor table, then each tensor at a multiple of 32 bytes.

A tensor's dimensions are written fastest first, so an (N, K) matrix is [K, N]; offsets are relative to the first tensor.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from lowq_packers.formats.gguf import TYPES

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
_PACK = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table: name, (N, K) or (N,) shape, and GGUF type ("Q4_0", "F32", ...)."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes of its data, without the padding after it."""
        block = TYPES[self.kind]
        return prod(self.shape) // block.elements * block.nbytes


@dataclass(frozen=True)
class Value:
    """A metadata value and its type; an array if `of` is set."""

    kind: int
    value: Any
    of: int | None = None


u32, f32, flag, text, array = (partial(Value, kind) for kind in (UINT32, FLOAT32, BOOL, STRING, ARRAY))


def head(metadata: Iterable[tuple[str, Value]], tensors: Sequence[GgufTensor]) -> bytes:
    """All bytes before the first tensor's data, padded to its offset."""
    pairs = list(metadata)
    out = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(pairs))]
    for key, v in pairs:
        out += [_string(key), struct.pack("<I", v.kind), _encode(v)]
    at = 0
    for t in tensors:
        shape = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        out += [_string(t.name), shape, struct.pack("<IQ", TYPES[t.kind].number, at)]
        at += padded(t.nbytes)
    raw = b"".join(out)
    return raw + bytes(padded(len(raw)) - len(raw))


def padded(n: int) -> int:
    """`n` rounded up to ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def _string(s: str) -> bytes:
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def _encode(v: Value) -> bytes:
    if v.kind == STRING:
        return _string(v.value)
    if v.kind == ARRAY:
        assert v.of is not None
        items = b"".join(_encode(Value(v.of, item)) for item in v.value)
        return struct.pack("<IQ", v.of, len(v.value)) + items
    return struct.pack(_PACK[v.kind], v.value)
