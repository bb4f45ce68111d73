"""GGUF blocks that lowq holds code for code: 32 consecutive k of a row (TQ: 256, Q1_0: 128), with an fp16 scale d per block.

    Q4_0    d, 16 bytes         w = (q - 8) * d
    Q4_1    d, m, 16 bytes      w = q * d + m
    Q8_0    d, 32 int8          w = q * d
    IQ4_NL  d, 16 bytes         w = iq4_nl[q] * d
    MXFP4   e, 16 bytes         w = e2m1[q] * 2**(e - 127)
    TQ2_0   64 bytes, d         w = (q - 1) * d, q in 0 .. 2: read only, like TQ1_0, which has five such codes per byte
    Q1_0    d, 16 bytes         w = d or -d, one bit per weight

Further types (Q5_0, Q5_1, the K-quants, IQ4_XS: _gguf_blocks.py) are read as dense fp16 matrices.

Byte j of a block of 4-bit codes holds code j in its low half and code j + 16 in its high half. Longer groups repeat d and m.
This file decodes and encodes only the blocks; `lowq_cli.interop.gguf_file` reads the file (metadata, tokenizer, names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowq_packers.errors import DamagedError, SchemeError
from lowq_packers.formats import Config, Export, Fetch, Format, Headers, Matrix, WrongGroup, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.formats._gguf_blocks import Blocks, read_blocks
from lowq_packers.layouts import PackedWeight
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor, plausible
from lowq_packers.scheme import Scheme

BLOCK = 32
ROWS = 1 << 22  # max. weights to decode at a time, as fp32


@dataclass(frozen=True)
class BlockType:
    """A GGUF tensor type: its number in files, and the elements and bytes of a block."""

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
    BlockType("TQ1_0", 34, 256, 54), BlockType("TQ2_0", 35, 256, 66), BlockType("MXFP4", 39, BLOCK, 17),
    BlockType("Q1_0", 41, 128, 18),
)}  # fmt: skip
SCHEMES = {  # the types that lowq holds code for code
    "Q4_0": Scheme(4, BLOCK, "none"), "Q4_1": Scheme(4, BLOCK, "float"), "Q8_0": Scheme(8, BLOCK, "none"),
    "IQ4_NL": Scheme(4, BLOCK, "none", "iq4_nl"), "MXFP4": Scheme(4, BLOCK, "none", "e2m1", "e8m0"),
    "TQ1_0": Scheme(2, 256, "none"), "TQ2_0": Scheme(2, 256, "none"), "Q1_0": Scheme(1, 128, "none"),
}  # fmt: skip
QUANTIZED = tuple(SCHEMES)
PLAIN = c.TORCH  # GGUF's names of float dtypes are those of safetensors


def type_for(s: Scheme) -> str | None:
    """The GGUF type that holds a scheme; None if there is none."""
    if s.table:
        return {"iq4_nl": "IQ4_NL", "e2m1/e8m0": "MXFP4"}.get(s.kind)
    if s.bits == 1 and s.zero == "none":
        return "Q1_0"
    if s.bits == 4:
        return "Q4_0" if s.zero == "none" else "Q4_1"
    return "Q8_0" if s.bits == 8 and s.zero == "none" else None


def why_not(s: Scheme, N: int, K: int) -> str | None:
    """Why GGUF cannot hold a scheme, ending with the nearest one that it can hold; or None."""
    kind = type_for(s)
    if kind is None and s.table:
        return f"GGUF as lowq writes it holds mxfp4, not {s}; nearest: --format mxfp4"
    if kind is None:
        flags = "--bits 8 --zero none" if s.bits == 8 else "--bits 4 --group 32"
        return f"GGUF holds 4 bits, and 8 without a zero, not {s.bits} bits with {s.zero} zeros; nearest: {flags}"
    block = TYPES[kind].elements
    fact = f"GGUF blocks of {kind} are {block} long, a group of {s.group_size} is not made of them"
    return WrongGroup(fact, block) if s.group_size % block else None


def _half(values: torch.Tensor, name: str) -> torch.Tensor:
    """The same values in fp16. Raises SchemeError if fp16 does not hold one of them exactly."""
    half = values.to(torch.float16)
    if not torch.equal(half.double(), values.double()):
        lost = values[half.double() != values.double()].flatten()[0].item()
        raise SchemeError(f"{name}: the scale {lost:.6g} does not fit GGUF's fp16; quantize with --dtype float16")
    return half


def _fields(q: QuantizedTensor | PackedWeight, name: str, rounding: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and Q4_1's offsets of the groups, in fp16. Raises SchemeError if fp16 cannot hold them, unless `rounding`."""
    kind = type_for(q.scheme)
    scales = q.scales.float() / 2 if kind == "Q1_0" else q.scales  # GGUF's values are -d and d, lowq's -s/2 and s/2
    d = scales.to(torch.float16) if rounding else _half(scales, name)
    return d, c.zeros_to_offset(q, name, torch.float16, rounding) if kind == "Q4_1" else None


def check_values(p: PackedWeight, name: str, rounding: bool) -> None:
    """Raise the SchemeErrors of `encode` for scales and zeros."""
    if type_for(p.scheme) != "MXFP4":
        _fields(p, name, rounding)


def encode(q: QuantizedTensor, name: str, rounding: bool = False) -> torch.Tensor:
    """(N, K / 32 * block bytes) uint8. Raises SchemeError if fp16 cannot hold scales or offsets, unless `rounding`."""
    kind = type_for(q.scheme)
    if kind is None or q.group_size % TYPES[kind].elements:
        raise SchemeError(f"{name}: {why_not(q.scheme, *q.shape)}")
    N = q.shape[0]
    block = TYPES[kind].elements
    repeat = q.group_size // block

    def blocks(per_group: torch.Tensor) -> torch.Tensor:
        return per_group.repeat_interleave(repeat, 1).contiguous().view(torch.uint8).reshape(N, q.shape[1] // block, -1)

    codes = q.W_q.reshape(N, -1, block)
    if kind == "MXFP4":
        return torch.cat([blocks(q.scales), _halves(codes)], -1).reshape(N, -1)
    scales, offsets = _fields(q, name, rounding)
    d = blocks(scales)
    if kind == "Q8_0":
        return torch.cat([d, codes ^ 0x80], -1).reshape(N, -1)  # q - 128 as int8 is q with its top bit flipped
    if kind == "Q1_0":
        bits = codes.reshape(N, -1, block // 8, 8) << torch.arange(8, dtype=torch.uint8)
        return torch.cat([d, bits.sum(-1, dtype=torch.uint8)], -1).reshape(N, -1)
    if offsets is not None:
        d = torch.cat([d, blocks(offsets)], -1)
    return torch.cat([d, _halves(codes)], -1).reshape(N, -1)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """(..., 32) 4-bit codes -> (..., 16) bytes."""
    return codes[..., :16] | (codes[..., 16:] << 4)


def decode(raw: torch.Tensor, kind: str, N: int, K: int, name: str = "a tensor") -> QuantizedTensor:
    """Inverse of `encode`; each block becomes a group: (N * K / block * bytes) uint8 -> codes, fp16 scales (MXFP4: bytes).

    Raises DamagedError, with `name`, for ternary codes above 2 and for MXFP4 exponents that are NaN.
    """
    s, blocks = SCHEMES[kind], raw.reshape(N, K // TYPES[kind].elements, TYPES[kind].nbytes)

    def halves(at: int) -> torch.Tensor:
        return blocks[..., at : at + 2].contiguous().view(torch.float16).reshape(N, -1)

    if kind in ("TQ1_0", "TQ2_0"):
        ternary = _base3(blocks[..., :-2]) if kind == "TQ1_0" else _quarters(blocks[..., :-2])
        if int(ternary.max()) > 2:
            raise DamagedError(f"{name} is {kind} with codes beyond -1, 0 and 1; fetch the model again")
        return QuantizedTensor.of(s, ternary.reshape(N, K) + 1, halves(TYPES[kind].nbytes - 2), None)
    if kind == "Q1_0":
        d = halves(0).float() * 2
        codes = (blocks[..., 2:].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return QuantizedTensor.of(s, codes.reshape(N, K), d.half() if bool((d.abs() < 65520).all()) else d, None)
    d = halves(0) if kind != "MXFP4" else blocks[..., 0].contiguous()
    if kind == "Q8_0":
        return QuantizedTensor((blocks[..., 2:] ^ 0x80).reshape(N, K), d, None, 8, BLOCK)
    packed = blocks[..., TYPES[kind].nbytes - 16 :]
    codes = torch.cat([packed & 15, packed >> 4], -1).reshape(N, K)
    if kind == "Q4_1":
        codes, d, zeros = c.offset_to_zeros(codes, d, halves(2), BLOCK)
        return QuantizedTensor(codes, d, zeros, 4, BLOCK, "float")
    if kind == "MXFP4" and not plausible(d, s, "scale"):
        raise DamagedError(f"{name} is MXFP4 with exponents that are NaN; fetch the model again")
    return QuantizedTensor.of(s, codes, d, None)


def _quarters(stored: torch.Tensor) -> torch.Tensor:
    """(..., 64) bytes -> (..., 2, 4, 32) codes: bit pair j of 32 bytes is the j-th run of 32 codes."""
    bytes_ = stored.reshape(*stored.shape[:-1], 2, 1, 32)
    return (bytes_ >> (2 * torch.arange(4, dtype=torch.uint8)).reshape(4, 1)) & 3


def _base3(stored: torch.Tensor) -> torch.Tensor:
    """(..., 52) bytes -> (..., 256) codes 0 .. 2: base-3 digit j of the fraction byte / 256 is a code of the j-th run."""
    runs = []
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**j for j in range(digits)], dtype=torch.int32).reshape(-1, 1)
        fractions = (stored[..., None, first:last].int() * powers) & 255
        runs.append(((fractions * 3) >> 8).flatten(-2))
    return torch.cat(runs, -1).to(torch.uint8)


def permute_heads(rows: torch.Tensor, heads: int, inverse: bool = False) -> torch.Tensor:
    """Reorder rows (N, ...) of q or k from Hugging Face's order (halves) to llama.cpp's (adjacent rotary pairs), or back."""
    N = rows.shape[0]
    if N % (2 * heads):
        raise SchemeError(f"{N} rows are not {heads} heads of an even size")
    pairs = (heads, N // heads // 2, 2) if inverse else (heads, 2, N // heads // 2)
    return rows.reshape(*pairs, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    """The matrices of a GGUF file; config["gguf"], from the reader of the file, has the type and shape of each tensor."""
    stored = c.section(config, "gguf")
    return [_matrix(name, facts) for name, facts in stored.items()]


def _matrix(name: str, facts: Mapping[str, Any]) -> Matrix:
    kind, heads = facts["type"], facts["heads"]
    shape = tuple(facts["shape"])
    N, K = shape if len(shape) == 2 else (shape[0], 1)

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        raw = fetch(name)
        if kind not in QUANTIZED:
            plain = kind in PLAIN
            rows = (
                raw.view(getattr(torch, PLAIN[kind])).reshape(shape)
                if plain
                else _dense(read_blocks(raw, kind, N, K, name.removesuffix(".weight")))
            )
            return rows if heads is None else permute_heads(rows, heads, inverse=True).contiguous()
        q = decode(raw, kind, N, K, name)
        if heads is None:
            return q
        moved = [None if t is None else permute_heads(t, heads, inverse=True).contiguous() for t in (q.W_q, q.scales, q.zeros)]
        return QuantizedTensor.of(q.scheme, moved[0], moved[1], moved[2])  # type: ignore[arg-type]

    dtype = kind if kind in PLAIN else "BF16" if kind == "MXFP4" else "F16"  # MXFP4's powers of two exceed fp16's range
    bits = 8 * TYPES[kind].nbytes if kind in PLAIN else SCHEMES[kind].bits if kind in SCHEMES else int(kind.lstrip("IQ")[0])
    return Matrix(name.removesuffix(".weight"), (N, K), (name,), read, kind, bits, SCHEMES.get(kind), dtype)


def _dense(q: Blocks) -> torch.Tensor:
    """(N, K) fp16, dequantized in chunks of rows."""
    out, step = torch.empty(q.codes.shape, dtype=torch.float16), max(1, ROWS // q.codes.shape[1])
    for i in range(0, len(out), step):
        out[i : i + step] = q.each(lambda t, i=i: t[i : i + step]).dequantize()  # type: ignore[misc]
    return out


def _claims(config: Config, headers: Headers) -> bool:
    return "gguf" in config


ENGINES, TABLES = served_by("lowq", "llama.cpp", "Ollama", "LM Studio"), ("iq4_nl", "e2m1")
EXPORT = Export(7, embeddings=True, one_file=True, extra=False)
register(
    Format("gguf", "GGUF", _matrices, ENGINES, why_not, export=EXPORT, tables=TABLES, claims=_claims, check_values=check_values)
)
