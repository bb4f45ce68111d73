"""look_up in one kernel, with the bits of its definition, for grids of 8, 4, 2 and 1 bits in layouts of a GPU.

Maths   y = round(round((code - zero) * scale) * factor); zero is the middle of the codes where a scheme has none
Grid    (n, blocks of K): a program computes BLOCK values of one row
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.rounding_triton import DTYPES, rounded
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import CHUNK, ROWS, WORDS

LAYOUTS = ("rowstream", "strided", "tile")
ROWSTREAM, STRIDED, TILE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TILE_ROWS = tl.constexpr(ROWS)
BLOCK = 1024  # max. values per program


@triton.jit
def _look_up_kernel(
    ids_ptr, words_ptr, scales_ptr, zeros_ptr, y_ptr, V, K, groups, width, factor,
    LAYOUT: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """width: words of a row of `words`. SIZE: weights of a group."""
    i, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, mask = tl.load(ids_ptr + i), k < K
    group = k // SIZE
    if LAYOUT == TILE:
        tile, row = n // TILE_ROWS, (n % TILE_ROWS).to(tl.int32)
        fragment, rest = k % CHUNK // 16, k % 16
        lane, register = row % 8 * 4 + rest % 8 // 2, row // 8 + rest // 8 * 2
        held = 16 // BITS  # fragments in a word
        word = tile * width + k // CHUNK * WORDS + (fragment // held * 32 + lane) * 4 + register
        shift = (rest % 2 * held + fragment % held) * BITS
        at = (tile * groups + group) * TILE_ROWS + row % 8 * 2 + row // 8
    else:
        shift = k * BITS % 32
        if LAYOUT == ROWSTREAM:
            word, at = n * width + k * BITS // 32, n * groups + group
        else:
            word, at = (k * BITS // 32).to(tl.int64) * V + n, group.to(tl.int64) * V + n
    codes = (tl.load(words_ptr + word, mask=mask, other=0).to(tl.uint32, bitcast=True) >> shift) & ((1 << BITS) - 1)
    scales = tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
    middle = MIDDLE
    if ZEROS:
        middle = tl.load(zeros_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = rounded((codes.to(tl.float32) - middle) * scales, DTYPE)
    if factor != 1.0:
        y = rounded(y * factor, DTYPE)
    tl.store(y_ptr + i * K + k, y.to(DTYPE), mask=mask)


def takes(p: PackedWeight) -> bool:
    """Whether the kernel takes such a table."""
    s = p.scheme
    return s.bits != 3 and not s.table and s.scale == "float" and s.block_rows == 1 and p.layout in LAYOUTS


def look_up(p: PackedWeight, ids: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """As `look_up.look_up`, for ids (n,)."""
    s, y = p.scheme, torch.empty(ids.shape[0], p.K, dtype=dtype, device=ids.device)
    if not y.numel():
        return y
    factor = torch.tensor(factor, dtype=dtype).item()  # rounded as the factor that torch multiplies with
    block = min(BLOCK, triton.next_power_of_2(p.K))
    with torch.cuda.device_of(ids):  # Triton launches on the current device
        _look_up_kernel[(ids.shape[0], triton.cdiv(p.K, block))](
            ids, p.words, p.scales, p.scales if p.zeros is None else p.zeros, y, p.N, p.K, s.groups(p.K), p.words.shape[1],
            factor,
            LAYOUT=LAYOUTS.index(p.layout), BITS=s.bits, SIZE=s.group_size, ZEROS=p.zeros is not None, MIDDLE=float(s.mid),
            DTYPE=DTYPES[dtype], CHUNK=CHUNK[s.bits], WORDS=WORDS[s.bits], BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
