"""cpu: rows interleaved for vector registers: one load of 16 words holds codes of the same k of 16 rows.

Rows come in tiles of 16, n = 16*t + r; N is padded to whole tiles, K to whole chunks of 32 codes, both with code 0.
words (T, C*bits*16) int32, T = N'/16, C = K'/32: [chunk][word of the row's chunk][r 16].
  8, 4, 2, 1 bits: the words of rowstream, so that packing is a transpose of words.
  3 bits: words 0 and 1 hold code & 3 of codes 0..15 and 16..31 as at 2 bits; bit 4*w + i of byte b of word 2 is
          code >> 2 of code 16*w + 4*b + i.
Four codes that a dot product takes at once lie in the four bytes of a word, at the same shift.
scales, zeros (T, G, 16); padded rows hold 0.
"""

from __future__ import annotations

from lowq_packers import bitstream
from lowq_packers.layouts import Layout, PackedWeight, register
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

ROWS = 16  # rows per tile
CHUNK = 32  # codes of a row that fill whole words at every width


def chunks(K: int) -> int:
    """C: chunks of a row of K codes."""
    return -(-K // CHUNK)


def _why_not(scheme: Scheme, N: int, K: int) -> str | None:
    step = CHUNK // 2 if scheme.table else CHUNK  # table kernels work on half chunks
    if scheme.group_size % step and scheme.group_size != K:
        return f"groups are multiples of {step} or whole rows, not {scheme.group_size}"
    return None


def _tiles(t: torch.Tensor) -> torch.Tensor:
    """(N, X) -> (T, X, 16), rows padded with 0."""
    t = torch.nn.functional.pad(t, (0, 0, 0, -t.shape[0] % ROWS)) if t.shape[0] % ROWS else t
    return t.reshape(-1, ROWS, t.shape[1]).transpose(1, 2).contiguous()


def _rows(t: torch.Tensor, N: int) -> torch.Tensor:
    """Inverse of `_tiles`."""
    return t.transpose(1, 2).reshape(-1, t.shape[1])[:N].contiguous()


def _high_order(codes: torch.Tensor) -> torch.Tensor:
    """(N, K') codes as the third word of a 3-bit chunk takes them: place 8*b + 4*w + i from 16*w + 4*b + i."""
    return codes.reshape(codes.shape[0], -1, 2, 4, 4).transpose(2, 3).reshape(codes.shape)


def _row_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(N, K') codes -> (N, C*bits) words of each row."""
    if bits != 3:
        return bitstream.pack(codes, bits)
    N = codes.shape[0]
    low = bitstream.pack(codes & 3, 2).reshape(N, -1, 2)
    high = bitstream.pack(_high_order(codes >> 2), 1).reshape(N, -1, 1)
    return torch.cat([low, high], 2).reshape(N, -1)


def _row_codes(words: torch.Tensor, bits: int, K: int) -> torch.Tensor:
    """Inverse of `_row_words`, cut to K codes."""
    N, wide = words.shape[0], chunks(K) * CHUNK
    if bits != 3:
        return bitstream.unpack(words, bits, K)
    split = words.reshape(N, -1, 3)
    low = bitstream.unpack(split[..., :2].reshape(N, -1), 2, wide)
    high = bitstream.unpack(split[..., 2].contiguous(), 1, wide)
    high = high.reshape(N, -1, 4, 2, 4).transpose(2, 3).reshape(N, wide)
    return (low | high << 2)[:, :K].contiguous()


def _packed(row_words: torch.Tensor, like: QuantizedTensor | PackedWeight, N: int, K: int) -> PackedWeight:
    """From each row's words, and scales and zeros (N, G)."""
    words, zeros = _tiles(row_words), None if like.zeros is None else _tiles(like.zeros)
    return PackedWeight(
        words.reshape(words.shape[0], -1), _tiles(like.scales), zeros, like.scheme, N, K, "cpu", table=like.table
    )


def _pack(q: QuantizedTensor) -> PackedWeight:
    return _packed(_row_words(torch.nn.functional.pad(q.W_q, (0, -q.shape[1] % CHUNK)), q.bits), q, *q.shape)


def _from_rowstream(p: PackedWeight) -> PackedWeight:
    bits, wide = p.scheme.bits, chunks(p.K) * CHUNK
    if bits == 3:
        return _packed(_row_words(bitstream.unpack(p.words, bits, wide), bits), p, p.N, p.K)
    return _packed(torch.nn.functional.pad(p.words, (0, wide * bits // 32 - p.words.shape[1])), p, p.N, p.K)


def _unpack(p: PackedWeight) -> QuantizedTensor:
    s, T = p.scheme, p.words.shape[0]
    codes = _row_codes(_rows(p.words.reshape(T, -1, ROWS), p.N), s.bits, p.K)
    zeros = None if p.zeros is None else _rows(p.zeros, p.N)
    return QuantizedTensor.of(s, codes, _rows(p.scales, p.N), zeros, p.table)


def _take(p: PackedWeight, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    tile, row = at // ROWS, at % ROWS
    words = p.words.reshape(p.words.shape[0], -1, ROWS)[tile, :, row]
    return _row_codes(words, p.scheme.bits, p.K), p.scales[tile, :, row], None if p.zeros is None else p.zeros[tile, :, row]


def _shapes(scheme: Scheme, N: int, K: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    T = -(-N // ROWS)
    return (T, chunks(K) * scheme.bits * ROWS), (T, scheme.groups(K), ROWS)


register(Layout("cpu", _pack, _unpack, _why_not, _from_rowstream, _shapes, ROWS, rows=_take))
