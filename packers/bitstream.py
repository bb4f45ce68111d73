"""Dense little-endian bit streams of codes along the last dimension: the words of every lowq layout.

Code j of a row occupies bits j*bits .. (j+1)*bits - 1 of the row's stream; bit i of the stream is bit i % 32 of int32
word i // 32. Eight codes are squeezed at once inside an int64 (three shift-or-mask steps), for every width alike, so
there is no loop over elements: 4096 x 4096 codes pack in 25 to 60 ms on two cores.
"""

from __future__ import annotations

from lowq_packers.errors import SchemeError
from lowq_packers.lazy import torch

_CODES = 8  # codes per int64 lane: one code per byte in, `bits` bytes out


def words_per_row(K: int, bits: int, word_bits: int = 32) -> int:
    """Words that hold K codes of `bits` bits, the last one padded with zero bits."""
    return -(-K * bits // word_bits)


def _steps(bits: int) -> list[tuple[int, int]]:
    """(shift, mask) of the three squeezing steps: neighbours 1, 2 and 4 codes apart close the gap of 8 - bits bits.

    Raises SchemeError for 5, 6 and 7 bits: shifted by less than their width, codes would run into each other.
    """
    if bits > 4:
        raise SchemeError(f"{bits}-bit codes cannot be packed; use 8, 4, 3, 2 or 1")
    steps = []
    for span in (2, 4, 8):
        field = (1 << (bits * span)) - 1
        mask = sum(field << (8 * span * i) for i in range(_CODES // span))
        steps.append(((8 - bits) * span // 2, mask if mask < 1 << 63 else mask - (1 << 64)))
    return steps


def _rows(t: torch.Tensor) -> torch.Tensor:
    """`t` contiguous and at an aligned address, so that `view` as a wider dtype works.

    `contiguous` alone does not change the strides of one-row tensors or the storage offset of a slice.
    """
    flat = t.contiguous().flatten()
    wrong = flat.stride(0) != 1 or flat.storage_offset() * flat.element_size() % 8  # a single element keeps any stride
    return (flat.clone(memory_format=torch.contiguous_format) if wrong else flat).reshape(t.shape)


def pack(codes: torch.Tensor, bits: int, container: torch.dtype | None = None) -> torch.Tensor:
    """(..., K) uint8 codes -> (..., words_per_row) `container` words (uint8, int16, int32 or int64; int32 unless named)."""
    container = container or torch.int32
    lead, K = codes.shape[:-1], codes.shape[-1]
    word_bytes = container.itemsize
    n_bytes = words_per_row(K, bits, 8 * word_bytes) * word_bytes
    lanes = -(-K // _CODES)
    if K % _CODES:
        codes = torch.nn.functional.pad(codes, (0, lanes * _CODES - K))
    if bits < 8:
        x = _rows(codes).view(torch.int64)
        for shift, mask in _steps(bits):
            x = (x >> shift).bitwise_or_(x).bitwise_and_(mask)
        stream = x.view(torch.uint8).reshape(*lead, lanes, _CODES)[..., :bits].reshape(*lead, lanes * bits)
    else:
        stream = codes
    if stream.shape[-1] < n_bytes:
        stream = torch.nn.functional.pad(stream, (0, n_bytes - stream.shape[-1]))
    return _rows(stream[..., :n_bytes]).view(container)


def unpack(words: torch.Tensor, bits: int, K: int) -> torch.Tensor:
    """Inverse of `pack`: (..., W) words of any integer dtype -> (..., K) uint8 codes."""
    lead = words.shape[:-1]
    stream = _rows(words).view(torch.uint8)
    if bits == 8:
        return stream[..., :K].contiguous()
    lanes = -(-K // _CODES)
    if stream.shape[-1] < lanes * bits:
        stream = torch.nn.functional.pad(stream, (0, lanes * bits - stream.shape[-1]))
    bytes8 = torch.zeros(*lead, lanes, _CODES, dtype=torch.uint8, device=words.device)
    bytes8[..., :bits] = stream[..., : lanes * bits].reshape(*lead, lanes, bits)
    x = bytes8.view(torch.int64).squeeze(-1)
    steps = _steps(bits)
    one_per_byte = sum(((1 << bits) - 1) << (8 * i) for i in range(_CODES))
    spread = [steps[1][1], steps[0][1], one_per_byte]  # undoing a step restores the mask of the step before it
    for (shift, _), mask in zip(reversed(steps), spread, strict=True):
        x = (x << shift).bitwise_or_(x).bitwise_and_(mask)
    return x.view(torch.uint8).reshape(*lead, lanes * _CODES)[..., :K].contiguous()
