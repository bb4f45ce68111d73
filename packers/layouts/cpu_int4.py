"""cpu_int4: torch's own packed 4-bit words for `_weight_int4pack_mm_for_cpu`.

In memory only: torch picks the order of the words for this CPU.
words (P, N', K // 2) uint8, N' = N rounded up to 16. One plane of codes at 4, 3, 2 and 1 bits; at 8 bits two planes,
high nibbles then low. aux (P, G', N', 2) bf16 is torch's scales-and-zeros, w = (q - 8) * s + z. G' groups of 32, 64, 128
or 256: a coarser or odd group (96, K) is repeated over the largest of those that divides it. scales, zeros stay (N, G).
"""

from __future__ import annotations

from functools import cache

from lowq_packers.layouts import Layout, PackedWeight, meta_rows, register, unpack
from lowq_packers.lazy import torch
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

TORCH_GROUPS = (256, 128, 64, 32)
ROWS = 64  # torch orders the words within slabs of 64 rows; the last slab may be shorter
ROW_STEP = 16
AT_ONCE = 256  # rows interleaved at a time, so that their bytes stay in the cache
LOW = 0x0F0F0F0F0F0F0F0F


def torch_group(group_size: int) -> int | None:
    """The group size to call torch with: the largest it takes that divides `group_size`."""
    return next((g for g in TORCH_GROUPS if group_size % g == 0), None)


def _why_not(scheme: Scheme, N: int, K: int) -> str | None:
    if scheme.table:
        return f"torch's kernel takes evenly spaced values, not the table {scheme.table}"
    if torch_group(scheme.group_size) is None:
        return f"torch's kernel takes groups that are multiples of 32, not {scheme.group_size}"
    return None


def _shift(scheme: Scheme) -> int:
    """The offset that centres codes among torch's sixteen."""
    return 8 - scheme.levels // 2 if scheme.bits < 8 else 0


def _convert(codes: torch.Tensor) -> torch.Tensor:
    """(N', K) codes -> (N', K // 2) uint8 in torch's order for this CPU."""
    return torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """(N', K) codes below 16 -> (N', K // 2) bytes, the even code in the low nibble: rowstream's order at 4 bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _interleaved(pairs: torch.Tensor, half: int) -> torch.Tensor:
    """`_convert` of `_pairs`, where a slab of 2 * half rows lies as (K, half) bytes of row r and, high, row r + half.

    29 ms a core for 16384 x 2048 codes; torch's own takes 94 ms, and codes as int32 first.
    """
    out = torch.empty_like(pairs)
    for n0 in range(0, pairs.shape[0], AT_ONCE):
        slab = pairs[n0 : n0 + AT_ONCE].t().contiguous().view(torch.int64)
        low, high = slab.view(slab.shape[0], -1, 2, half // 8).transpose(0, 1).unbind(2)  # (slabs, K // 2, half // 8)
        to = out[n0 : n0 + AT_ONCE].view(-1).view(torch.int64).view(low.shape[0], -1, 2, half // 8)
        to[:, :, 0] = low & LOW | (high & LOW) << 4
        to[:, :, 1] = low >> 4 & LOW | high & ~LOW
    return out


@cache
def _half() -> int:
    """The `half` with which `_interleaved` equals torch's order on this CPU; 0 if torch has another order."""
    codes = torch.arange(ROWS * 32, dtype=torch.int32).mul_(40503).bitwise_right_shift_(7).bitwise_and_(15).reshape(ROWS, 32)
    expected, pairs = _convert(codes), _pairs(codes.to(torch.uint8))
    return next((half for half in (32, 16) if torch.equal(_interleaved(pairs, half), expected)), 0)


def _words(pairs: torch.Tensor) -> torch.Tensor:
    """`_convert` of `_pairs`."""
    half = _half()
    whole = pairs.shape[0] // (2 * half) * (2 * half) if half else 0
    if whole == len(pairs):
        return _interleaved(pairs, half)
    rest = pairs[whole:]
    tail = _convert(torch.stack([rest & 15, rest >> 4], -1).flatten(1))
    return torch.cat([_interleaved(pairs[:whole], half), tail]) if whole else tail


def _pack(q: QuantizedTensor) -> PackedWeight:
    W_q = torch.nn.functional.pad(q.W_q, (0, 0, 0, -q.shape[0] % ROW_STEP))
    # codes are centred on torch's 8, so that the offset stays small and its bf16 rounding too
    planes = [W_q >> 4, W_q & 15] if q.bits == 8 else [W_q + _shift(q.scheme)]
    return _packed([_pairs(p) for p in planes], *meta_rows(q), q.scheme, *q.shape)


def _from_rowstream(p: PackedWeight) -> PackedWeight:
    """At 4 bits rowstream's bytes are the pairs."""
    if p.scheme.bits != 4:
        return _pack(unpack(p))
    pairs = p.words.contiguous().view(torch.uint8)[:, : p.K // 2]
    if p.N % ROW_STEP:
        pairs = torch.nn.functional.pad(pairs, (0, 0, 0, -p.N % ROW_STEP))
    return _packed([pairs], p.scales.contiguous(), None if p.zeros is None else p.zeros.contiguous(), p.scheme, p.N, p.K)


def _packed(
    planes: list[torch.Tensor], scales: torch.Tensor, zeros: torch.Tensor | None, s: Scheme, N: int, K: int
) -> PackedWeight:
    """The weight of these planes of pairs (N', K // 2); scales, zeros (N, G)."""
    scale = scales.float()
    zero = torch.full_like(scale, s.mid) if zeros is None else zeros.float()
    if s.bits == 8:
        # (16h + l - z) s = (h - 8) 16s + [(l - 8) s + (136 - z) s]: the offset, small for a usual z, rounds once, in bf16
        pairs = [(16 * scale, torch.zeros_like(scale)), (scale, (136 - zero) * scale)]
    else:
        pairs = [(scale, (s.levels // 2 - zero) * scale)]
    repeat = s.group_size // (torch_group(s.group_size) or 1)
    aux = torch.stack([torch.stack(pair, -1) for pair in pairs])  # (P, N, G, 2)
    aux = torch.nn.functional.pad(aux.repeat_interleave(repeat, 2), (0, 0, 0, 0, 0, -N % ROW_STEP))
    aux = aux.transpose(1, 2).contiguous().bfloat16()
    words = torch.stack([_words(p) for p in planes]) if len(planes) > 1 else _words(planes[0])[None]
    return PackedWeight(words, scales, zeros, s, N, K, "cpu_int4", aux)


@cache
def _order(rows: int, K: int) -> torch.Tensor:
    """Where each code of a (rows, K) slab went: position i of the unpacked nibbles holds code `order[i]`.

    Found by packing the positions themselves, a hexadecimal digit at a time: no knowledge of torch's order is needed.
    """
    position = torch.arange(rows * K, dtype=torch.int32).reshape(rows, K)
    order = torch.zeros(rows * K, dtype=torch.int64)
    for shift in range(0, (rows * K - 1).bit_length(), 4):
        order |= _nibbles(_convert((position >> shift) & 15)).long() << shift
    return order


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([words & 15, words >> 4], -1).flatten()


def _codes(words: torch.Tensor, K: int) -> torch.Tensor:
    """Inverse of `_convert`."""
    out = torch.empty(words.shape[0], K, dtype=torch.uint8)
    for n0 in range(0, words.shape[0], ROWS):
        slab = words[n0 : n0 + ROWS]
        flat = torch.empty(slab.shape[0] * K, dtype=torch.uint8)
        flat[_order(slab.shape[0], K)] = _nibbles(slab)
        out[n0 : n0 + ROWS] = flat.reshape(-1, K)
    return out


def _unpack(p: PackedWeight) -> QuantizedTensor:
    s = p.scheme
    planes = [_codes(plane, p.K)[: p.N] for plane in p.words.cpu()]
    W_q = planes[0] - _shift(s) if len(planes) == 1 else planes[0] << 4 | planes[1]
    return QuantizedTensor(W_q.to(p.words.device), p.scales, p.zeros, s.bits, s.group_size, s.zero)


register(Layout("cpu_int4", _pack, _unpack, _why_not, _from_rowstream, device="cpu"))
