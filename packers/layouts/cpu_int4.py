"""cpu_int4: torch's own packed 4-bit words for `_weight_int4pack_mm_for_cpu`.

In memory only: torch picks the order of the words for this CPU.
words (P, N', K // 2) uint8, N' = N rounded up to 16. One plane of codes at 4, 3, 2 and 1 bits; at 8 bits two planes,
high nibbles then low. aux (P, G', N', 2) bf16 is torch's scales-and-zeros, w = (q - 8) * s + z. G' groups of 32, 64, 128
or 256: a coarser or odd group (96, K) is repeated over the largest of those that divides it. scales, zeros stay (N, G).
"""

from functools import cache

import torch

from lowq_packers.layouts import Layout, PackedWeight, own_companions, register
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

TORCH_GROUPS = (256, 128, 64, 32)
ROWS = 64  # torch orders the words within slabs of 64 rows; the last slab may be shorter
ROW_STEP = 16


def torch_group(group_size: int) -> int | None:
    """The group size to call torch with: the largest it takes that divides `group_size`."""
    return next((g for g in TORCH_GROUPS if group_size % g == 0), None)


def _why_not(scheme: Scheme, N: int, K: int) -> str | None:
    if torch_group(scheme.group_size) is None:
        return f"torch's kernel takes groups that are multiples of 32, not {scheme.group_size}"
    return None


def _shift(scheme: Scheme) -> int:
    """What is added to a code to centre it among torch's sixteen."""
    return 8 - scheme.levels // 2 if scheme.bits < 8 else 0


def _convert(codes: torch.Tensor) -> torch.Tensor:
    """(N', K) codes -> (N', K // 2) uint8 in torch's order for this CPU."""
    return torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def _pack(q: QuantizedTensor) -> PackedWeight:
    (N, K), s = q.shape, q.scheme
    rows = -N % ROW_STEP
    W_q = torch.nn.functional.pad(q.W_q, (0, 0, 0, rows))
    scales = q.scales.float()
    zeros = torch.full_like(scales, s.mid) if q.zeros is None else q.zeros.float()
    if s.bits == 8:
        # (16h + l - z) s = (h - 8) 16s + [(l - 8) s + (136 - z) s]: the offset, small for a usual z, rounds once, in bf16
        planes = [(W_q >> 4, 16 * scales, torch.zeros_like(scales)), (W_q & 15, scales, (136 - zeros) * scales)]
    else:
        # widened codes are centred on torch's 8, so that the offset stays small and its bf16 rounding too
        planes = [(W_q + _shift(s), scales, (s.levels // 2 - zeros) * scales)]
    repeat = s.group_size // (torch_group(s.group_size) or 1)
    aux = torch.stack([torch.stack([scale, offset], -1) for _, scale, offset in planes])  # (P, N, G, 2)
    aux = torch.nn.functional.pad(aux.repeat_interleave(repeat, 2), (0, 0, 0, 0, 0, rows))
    words = torch.stack([_convert(codes) for codes, _, _ in planes])
    aux = aux.transpose(1, 2).contiguous().bfloat16()
    return PackedWeight(words, *own_companions(q), s, N, K, "cpu_int4", aux)


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


register(Layout("cpu_int4", _pack, _unpack, _why_not, device="cpu"))
