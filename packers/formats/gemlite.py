"""GemLite state dicts: W_q (K/E, N) words, scales and zeros (G, N), metadata int32[12], orig_shape [N, K].

Words hold E consecutive codes along K, least significant first; int32 words are the transpose of lowq's words. The metadata
determines the meaning of `zeros`: raw zeros, or -zeros * scales (group mode 4, GemLite's default for float zeros), or one
number for the matrix. Modes 0 to 4 are: q, q - z, q * s, (q - z) * s, q * s + z'; channel modes 1 and 3 multiply by scales
afterwards.
"""

from __future__ import annotations

from math import prod

from lowq_packers import bitstream
from lowq_packers.errors import DamagedError, UnsupportedError
from lowq_packers.formats import Config, Fetch, Format, Headers, Matrix, WrongGroup, register, served_by
from lowq_packers.formats import _common as c
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

WORDS = ("U8", "I16", "I32", "I64")
SIZES = {"U8": 1, "I16": 2, "I32": 4, "I64": 8}
META = 12


def _claims(config: Config, headers: Headers) -> bool:
    return any(n.endswith(".metadata") and h.shape == (META,) and f"{n[:-9]}.orig_shape" in headers for n, h in headers.items())


def _matrices(config: Config, headers: Headers, fetch: Fetch | None) -> list[Matrix]:
    if fetch is None:
        raise UnsupportedError("the settings of a GemLite state dict are in its tensors; fetch the model first (hf download)")
    return [_matrix(p, headers, fetch) for p in c.modules(headers, ".metadata") if f"{p}.W_q" in headers]


def _matrix(p: str, headers: Headers, fetch: Fetch) -> Matrix:
    for leaf, count in (("metadata", META), ("orig_shape", 2)):
        c.need(headers, f"{p}.{leaf}", (count,), ("I32", "I64"))
    meta = [int(v) for v in fetch(f"{p}.metadata").tolist()]
    bits, group, E, channel, mode = meta[1], meta[2], meta[4], meta[9], meta[10]
    N, K = (int(v) for v in fetch(f"{p}.orig_shape").flatten().tolist())
    word = c.need(headers, f"{p}.W_q", dtypes=(*WORDS, "I8", *c.FLOATS, "F8_E4M3"))
    if word.dtype not in (*WORDS, "I8") or bits not in (8, 4, 2, 1) or not 0 <= mode <= 4:
        raise UnsupportedError(f"{p}: GemLite weights in {word.dtype} with {bits} bits and mode {mode} are not supported")
    if tuple(word.shape) != (K // max(E, 1), N) or K % max(E, 1):
        raise DamagedError(
            f"{p}.W_q has the shape {tuple(word.shape)}; {N} x {K} with {E} codes a word asks for {(K // max(E, 1), N)}"
        )
    if word.dtype in WORDS and (E * bits != 8 * SIZES[word.dtype] or meta[3] != (1 << bits) - 1):
        raise DamagedError(f"{p}: metadata says {E} codes of {bits} bits, mask {meta[3]:#x}, in a word of {word.dtype}")
    if f"{p}.meta_scale" in headers and bool((fetch(f"{p}.meta_scale").float() != 0).any()):
        raise UnsupportedError(f"{p}: GemLite weights with a meta_scale are not supported")
    scaled = mode in (2, 3, 4) or channel in (1, 3)
    G = next(iter(headers[f"{p}.scales"].shape), 1) if scaled and f"{p}.scales" in headers else 1
    g, _ = c.group_count(K, K // G if G and K % G == 0 else 0, p)
    if scaled:
        c.need(headers, f"{p}.scales", (G, N))
    zeros = headers.get(f"{p}.zeros")
    if zeros is not None and zeros.shape != (1, 0) and (mode == 4 or (mode in (1, 3) and prod(zeros.shape) != 1)):
        c.need(headers, f"{p}.zeros", (G, N), (*c.FLOATS, *WORDS, "I8"))
    if group not in (1, g, K) and group > 0:
        raise DamagedError(f"{p}: metadata says group_size={group}, its scales have {G} groups of K={K}")
    signed = word.dtype == "I8"
    parts = tuple(
        n for leaf in ("W_q", "scales", "zeros", "metadata", "orig_shape", "meta_scale") if (n := f"{p}.{leaf}") in headers
    )

    def read(fetch: Fetch) -> QuantizedTensor | torch.Tensor:
        words = fetch(f"{p}.W_q").t().contiguous()
        codes = (words.to(torch.int16) + 128).to(torch.uint8) if signed else bitstream.unpack(words, bits, K)
        scales = fetch(f"{p}.scales").t().contiguous() if scaled else torch.ones(N, 1)
        offset = 128.0 if signed else 0.0
        stored = fetch(f"{p}.zeros") if f"{p}.zeros" in headers and headers[f"{p}.zeros"].shape != (1, 0) else torch.empty(1, 0)
        if mode == 4:
            codes, scales, zeros = c.offset_to_zeros(codes, scales, stored.t().contiguous(), g)
        elif mode in (1, 3) and stored.numel() == 1:
            zeros = torch.full_like(scales, float(stored) + offset)
        elif mode in (1, 3):
            zeros = stored.t().to(scales.dtype) + offset
        else:
            zeros = torch.full_like(scales, offset)
        return c.decoded(codes, scales, zeros, bits, g, "float")

    dtype = headers[f"{p}.scales"].dtype if scaled else "F32"
    return Matrix(p, (N, K), parts, read, f"{bits}-bit g{g} mode {mode}", bits, c.held(bits, g, "float", K), dtype)


def _why_not(s: Scheme, N: int, K: int) -> str | None:
    if s.bits == 3:
        return "GemLite holds 8, 4, 2 and 1 bits, not 3; nearest: --bits 4 or 2"
    if K % 32:
        return f"GemLite takes a K that is a multiple of 32, not {K}"
    return WrongGroup(f"GemLite groups are at least 16, not {s.group_size}", 64) if s.group_size < 16 else None


register(Format("gemlite", "GemLite", _matrices, served_by("lowq", "GemLite"), _why_not, claims=_claims))
