"""GGUF blocks Q4_0, Q4_1 and Q8_0: 32 consecutive k of a row, an fp16 scale d in each block.

    Q4_0  d, 16 bytes         w = (q - 8) * d
    Q4_1  d, m, 16 bytes      w = q * d + m
    Q8_0  d, 32 int8          w = q * d

Further types (Q5_0, the K-quants, IQ4) are read dense, in fp16, by `decoders` from outside: as sources, no more.

Byte j of a 4-bit block holds code j in its low half and code j + 16 in its high half. A group of 64 or 128 repeats d and m.
The file around the blocks (metadata, tokenizer, names) is `lowq_cli.interop.gguf_file`'s; here is only what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowq_packers.errors import SchemeError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, register
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

BLOCK = 32


@dataclass(frozen=True)
class BlockType:
    """A GGUF tensor type: its number in files, elements and bytes of a block."""

    name: str
    number: int
    elements: int
    nbytes: int


TYPES = {t.name: t for t in (
    BlockType("F32", 0, 1, 4), BlockType("F16", 1, 1, 2), BlockType("Q4_0", 2, BLOCK, 18), BlockType("Q4_1", 3, BLOCK, 20),
    BlockType("Q8_0", 8, BLOCK, 34), BlockType("BF16", 30, 1, 2),
    BlockType("Q5_0", 6, BLOCK, 22), BlockType("Q5_1", 7, BLOCK, 24), BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110), BlockType("Q4_K", 12, 256, 144), BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210), BlockType("IQ4_NL", 20, BLOCK, 18), BlockType("IQ4_XS", 23, 256, 136),
)}  # fmt: skip
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
Decoder = Callable[["torch.Tensor", tuple[int, ...], str], "torch.Tensor"]  # bytes, shape, name of the tensor -> fp16 weights
decoders: dict[str, Decoder] = {}  # for the other types; the reader of files fills it
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def type_for(s: Scheme) -> str | None:
    """The GGUF type that holds a scheme, None if there is none."""
    if s.bits == 4:
        return "Q4_0" if s.zero == "none" else "Q4_1"
    return "Q8_0" if s.bits == 8 and s.zero == "none" else None


def why_not(s: Scheme, N: int, K: int) -> str | None:
    """The reason GGUF cannot hold a scheme, ending in the nearest one; or None."""
    if type_for(s) is None:
        wanted = "--bits 8 --zero none" if s.bits == 8 else "--bits 4 --group 32"
        return f"GGUF holds 4 bits, and 8 without a zero, not {s.bits} bits with {s.zero} zeros; nearest: {wanted}"
    return (
        f"GGUF blocks are 32 long, a group of {s.group_size} is not made of them; nearest: --group 32"
        if s.group_size % BLOCK
        else None
    )


def _half(values: torch.Tensor, name: str) -> torch.Tensor:
    """fp16 of the same values. Raises SchemeError if one does not survive."""
    half = values.to(torch.float16)
    if not torch.equal(half.double(), values.double()):
        lost = values[half.double() != values.double()].flatten()[0].item()
        raise SchemeError(f"{name}: the scale {lost:.6g} does not fit GGUF's fp16; quantize with --dtype float16")
    return half


def encode(q: QuantizedTensor, name: str, rounding: bool = False) -> torch.Tensor:
    """(N, K / 32 * block bytes) uint8. Raises SchemeError where fp16 does not hold scales or offsets, unless `rounding`."""
    kind = type_for(q.scheme)
    if kind is None or q.group_size % BLOCK:
        raise SchemeError(f"{name}: {why_not(q.scheme, *q.shape)}")
    N = q.shape[0]
    repeat = q.group_size // BLOCK

    def blocks(per_group: torch.Tensor) -> torch.Tensor:
        return per_group.repeat_interleave(repeat, 1).contiguous().view(torch.uint8).reshape(N, -1, 2)

    d = blocks(q.scales.to(torch.float16) if rounding else _half(q.scales, name))
    codes = q.W_q.reshape(N, -1, BLOCK)
    if kind == "Q8_0":
        return torch.cat([d, codes ^ 0x80], -1).reshape(N, -1)  # q - 128 as int8 is q with its top bit flipped
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    if kind == "Q4_0":
        return torch.cat([d, packed], -1).reshape(N, -1)
    m = c.zeros_to_offset(q, name, torch.float16, rounding)
    return torch.cat([d, blocks(m), packed], -1).reshape(N, -1)


def decode(raw: torch.Tensor, kind: str, N: int, K: int) -> QuantizedTensor:
    """Inverse of `encode`, with groups of 32: (N * K / 32 * block bytes) uint8 -> codes, fp16 scales."""
    blocks = raw.reshape(N, K // BLOCK, TYPES[kind].nbytes)

    def halves(at: int) -> torch.Tensor:
        return blocks[..., at : at + 2].contiguous().view(torch.float16).reshape(N, -1)

    d = halves(0)
    if kind == "Q8_0":
        return QuantizedTensor((blocks[..., 2:] ^ 0x80).reshape(N, K), d, None, 8, BLOCK)
    packed = blocks[..., TYPES[kind].nbytes - 16 :]
    codes = torch.cat([packed & 15, packed >> 4], -1).reshape(N, K)
    if kind == "Q4_0":
        return QuantizedTensor(codes, d, None, 4, BLOCK)
    codes, d, zeros = c.offset_to_zeros(codes, d, halves(2), BLOCK)
    return QuantizedTensor(codes, d, zeros, 4, BLOCK, "float")


def permute_heads(rows: torch.Tensor, heads: int, inverse: bool = False) -> torch.Tensor:
    """Rows of a q or k projection in llama.cpp's order (rotary pairs adjacent) from Hugging Face's (halves), or back."""
    N = rows.shape[0]
    if N % (2 * heads):
        raise SchemeError(f"{N} rows are not {heads} heads of an even size")
    pairs = (heads, N // heads // 2, 2) if inverse else (heads, 2, N // heads // 2)
    return rows.reshape(*pairs, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    """config["gguf"], made by the reader of the file, says what the bytes of each tensor are."""
    stored = c.section(config, "gguf")
    return [_matrix(name, facts) for name, facts in stored.items()]


def _matrix(name: str, facts: Mapping[str, Any]) -> Matrix:
    kind, heads = facts["type"], facts["heads"]
    shape = tuple(facts["shape"])
    N, K = shape if len(shape) == 2 else (shape[0], 1)

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        raw = fetch(name)
        if kind not in QUANTIZED:
            rows = raw.view(getattr(torch, PLAIN[kind])).reshape(shape) if kind in PLAIN else decoders[kind](raw, shape, name)
            return rows if heads is None else permute_heads(rows, heads, inverse=True).contiguous()
        q = decode(raw, kind, N, K)
        if heads is None:
            return q
        moved = [None if t is None else permute_heads(t, heads, inverse=True).contiguous() for t in (q.W_q, q.scales, q.zeros)]
        return QuantizedTensor(moved[0], moved[1], moved[2], q.bits, BLOCK, q.zero)  # type: ignore[arg-type]

    schemes = {"Q4_0": Scheme(4, BLOCK, "none"), "Q4_1": Scheme(4, BLOCK, "float"), "Q8_0": Scheme(8, BLOCK, "none")}
    dtype = kind if kind in PLAIN else "F16"
    bits = 8 * TYPES[kind].nbytes if kind in PLAIN else int(kind.lstrip("IQ")[0])
    return Matrix(name.removesuffix(".weight"), (N, K), (name,), read, kind, bits, schemes.get(kind), dtype)


def _engines(config: object, matrices: Sequence[object]) -> list[str]:
    return ["lowq", "llama.cpp", "Ollama", "LM Studio"]


EXPORT = Export(7, embeddings=True, one_file=True)
register(Format("gguf", "GGUF", lambda config, headers: "gguf" in config, _matrices, _engines, why_not, export=EXPORT))
