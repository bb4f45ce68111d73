"""tile: weights in the order of tensor-core fragments, so that one 16-byte load feeds whole mma (or wgmma) A operands.

Rows come in tiles of 16, n = 16*t + row; N is padded to a multiple of 64 rows (one wgmma), K to a multiple of CHUNK
codes (64 at 8 and 4 bits, 128 at 3 and 2, 256 at 1), both with code 0. A chunk is CHUNK // 16 fragments of 16 x 16
codes. Lane l of a warp (r = l // 4, quad = l % 4) holds of each fragment four registers j of two halves e:

    row = r + 8*(j % 2),   k = 16*f + 2*quad + e + 8*(j // 2)        (f: fragment in the chunk; k order is natural)

words (N'/16, C*W) int32; the W words of (tile t, chunk c) are, lane-major, so that neighbouring lanes read neighbouring
16 bytes:
  4, 2, 1 bits: [lane 32][j 4], W = 128. The code of fragment f, half e is bits [16*e + f*bits, +bits) of word j.
  8 bits: [f // 2, 2][lane 32][j 4], W = 256. The code of fragment f, half e is byte 2*e + f % 2 of word j.
  3 bits: [lane 32][j 4] holds code & 3 as at 2 bits; then [lane 32][j // 2, 2] holds code >> 2, one bit each, at bit
          16*e + 2*f + j % 2. W = 128 + 64.
In this order one `lop3` of (word >> shift) with a mask and a magic exponent gives a register of two halves, and all four
registers of a fragment have the same shift and magic.
scales, zeros (N'/16, G, 16): the row r + 8*i of a tile at place 2*r + i, so that a lane's two rows are one 4-byte load;
padded rows hold 0.
"""

from __future__ import annotations

from lowq_packers import bitstream
from lowq_packers.layouts import Layout, PackedWeight, register
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

ROWS = 16  # rows per tile
ROW_STEP = 64  # N is padded to this: a warpgroup's wgmma takes 64 rows
CHUNK = {8: 64, 4: 64, 3: 128, 2: 128, 1: 256}  # bits -> k of which a lane holds whole fragments
WORDS = {bits: chunk * bits // 2 for bits, chunk in CHUNK.items()}  # W: words per chunk of a tile


def chunks(K: int, bits: int) -> int:
    """C: chunks of a row of K codes."""
    return -(-K // CHUNK[bits])


def padded_rows(N: int) -> int:
    """N': rows held, N rounded up to ROW_STEP."""
    return -(-N // ROW_STEP) * ROW_STEP


def _fragments(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(N', K') codes -> (T, C, f, lane, j, e), a view."""
    T, C = codes.shape[0] // ROWS, codes.shape[1] // CHUNK[bits]
    split = codes.reshape(T, 2, 8, C, CHUNK[bits] // 16, 2, 4, 2)  # t, j % 2, r, c, f, j // 2, quad, e
    return split.permute(0, 3, 4, 2, 6, 5, 1, 7).reshape(T, C, CHUNK[bits] // 16, 32, 4, 2)


def _codes(fragments: torch.Tensor, N: int, K: int) -> torch.Tensor:
    """Inverse of `_fragments`, cut to (N, K)."""
    T, C, F = fragments.shape[:3]
    split = fragments.reshape(T, C, F, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
    return split.reshape(T * ROWS, C * F * 16)[:N, :K].contiguous()


def _plane(fragments: torch.Tensor, bits: int) -> torch.Tensor:
    """(T, C, f, lane, j, e) codes -> (T, C, words): [lane][j] words whose halves hold the f in order."""
    T, C, F = fragments.shape[:3]
    per_word = 16 // bits  # fragments that a 16-byte lane load holds
    split = fragments.reshape(T, C, F // per_word, per_word, 32, 4, 2).permute(0, 1, 2, 4, 5, 6, 3)
    return bitstream.pack(split.reshape(T, C, -1), bits)


def _unplane(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `_plane`."""
    T, C, W = words.shape
    per_word = 16 // bits
    split = bitstream.unpack(words, bits, W * 32 // bits).reshape(T, C, -1, 32, 4, 2, per_word)
    return split.permute(0, 1, 2, 6, 3, 4, 5).reshape(T, C, -1, 32, 4, 2)


def _high_plane(fragments: torch.Tensor) -> torch.Tensor:
    """(T, C, f, lane, j, e) bits -> (T, C, 64): [lane][j // 2] words, bit 16*e + 2*f + j % 2."""
    T, C, F = fragments.shape[:3]
    split = fragments.reshape(T, C, F, 32, 2, 2, 2).permute(0, 1, 3, 4, 6, 2, 5)  # lane, j // 2, e, f, j % 2
    return bitstream.pack(split.reshape(T, C, -1), 1)


def _high_unplane(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `_high_plane`."""
    T, C, W = words.shape
    split = bitstream.unpack(words, 1, W * 32).reshape(T, C, 32, 2, 2, 8, 2)
    return split.permute(0, 1, 5, 2, 3, 6, 4).reshape(T, C, 8, 32, 4, 2)


def _meta(t: torch.Tensor) -> torch.Tensor:
    """(N, G) scales or zeros -> (N'/16, G, 16)."""
    t = torch.nn.functional.pad(t, (0, 0, 0, -t.shape[0] % ROW_STEP))
    return t.reshape(-1, 2, 8, t.shape[1]).permute(0, 3, 2, 1).reshape(-1, t.shape[1], ROWS).contiguous()


def _unmeta(t: torch.Tensor, N: int) -> torch.Tensor:
    """Inverse of `_meta`."""
    T, G = t.shape[:2]
    return t.reshape(T, G, 8, 2).permute(0, 3, 2, 1).reshape(T * ROWS, G)[:N].contiguous()


def _pack(q: QuantizedTensor) -> PackedWeight:
    (N, K), bits = q.shape, q.bits
    fragments = _fragments(torch.nn.functional.pad(q.W_q, (0, -K % CHUNK[bits], 0, -N % ROW_STEP)), bits)
    words = torch.cat([_plane(fragments & 3, 2), _high_plane(fragments >> 2)], -1) if bits == 3 else _plane(fragments, bits)
    zeros = None if q.zeros is None else _meta(q.zeros)
    return PackedWeight(words.reshape(words.shape[0], -1), _meta(q.scales), zeros, q.scheme, N, K, "tile", table=q.table)


def _unpack(p: PackedWeight) -> QuantizedTensor:
    s = p.scheme
    words = p.words.reshape(p.words.shape[0], chunks(p.K, s.bits), WORDS[s.bits])
    if s.bits == 3:
        low, high = words.split([128, 64], -1)
        fragments = _unplane(low, 2) | _high_unplane(high) << 2
    else:
        fragments = _unplane(words, s.bits)
    zeros = None if p.zeros is None else _unmeta(p.zeros, p.N)
    return QuantizedTensor.of(s, _codes(fragments, p.N, p.K), _unmeta(p.scales, p.N), zeros, p.table)


def _take(p: PackedWeight, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    bits, n, C, (tile, row) = p.scheme.bits, at.shape[0], chunks(p.K, p.scheme.bits), (at // ROWS, at % ROWS)
    words = p.words.reshape(p.words.shape[0], C, -1)
    # what four lanes hold of a row r or r + 8: of each word the codes of two halves e
    lanes = lambda plane: plane.reshape(*plane.shape[:2], -1, 8, 4, 2, 2)[tile, :, :, row % 8, :, :, row // 8]  # noqa: E731
    width = 2 if bits == 3 else bits
    per_word = 16 // width
    low = bitstream.unpack(lanes(words[..., :128] if bits == 3 else words).unsqueeze(-1), width, 2 * per_word)
    codes = low.reshape(n, C, -1, 4, 2, 2, per_word)  # c, f // per_word, quad, j // 2, e, f % per_word
    if bits == 3:
        high = words[..., 128:].reshape(*words.shape[:2], 8, 4, 2)[tile, :, row % 8]
        high = bitstream.unpack(high.unsqueeze(-1), 1, 32).reshape(n, C, 1, 4, 2, 2, per_word, 2)
        codes = codes | torch.where((row < 8).reshape(-1, *[1] * 6), high[..., 0], high[..., 1]) << 2
    codes = codes.permute(0, 1, 2, 6, 4, 3, 5).reshape(n, -1)[:, : p.K].contiguous()
    place = row % 8 * 2 + row // 8
    return codes, p.scales[tile, :, place], None if p.zeros is None else p.zeros[tile, :, place]


def expected_shapes(scheme: Scheme, N: int, K: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of `words` and of `scales` (and zeros) for an (N, K) weight."""
    T = padded_rows(N) // ROWS
    return (T, chunks(K, scheme.bits) * WORDS[scheme.bits]), (T, scheme.groups(K), ROWS)


register(Layout("tile", _pack, _unpack, shapes=expected_shapes, row_step=ROW_STEP, rows=_take))
