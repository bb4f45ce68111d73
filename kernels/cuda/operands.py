"""Shared by the launchers of the tile kernels: operands in the form the device code reads, and limits of shared memory."""

import torch

from lowq_kernels.cuda import driver
from lowq_packers.layouts import PackedWeight, unpack
from lowq_packers.layouts.tile import ROWS, WORDS
from lowq_packers.scheme import Scheme
from lowq_packers.tables import values

TYPES = {torch.float16: 0, torch.bfloat16: 1}  # the device code's template argument T
# Max. bytes of shared memory of an SM's blocks (one or two): the rest stays L1 cache, through which the next layer's tile_mma
# reads x. An 8B model in 4 bits, one block of tile_wgmma per SM with all of the memory: 2387 us per step at 16 rows, 2910 us at
# 32 rows; with 196 KB 2242 and 2720 us. 2 bits at 16 rows, two blocks: 1897 us; with 164 KB 1779 us (tile_int8x2: 1842, 1725).
SMEM_KEEPING_L1 = {1: 196 << 10, 2: 164 << 10}


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) at a 16-byte aligned address; x itself if it is aligned."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def rows_of_x(x: torch.Tensor) -> torch.Tensor:
    """`aligned` x (M, K) with K a multiple of 8, whose rows then are 16 bytes, too (padded with zeros)."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8)) if x.shape[1] % 8 else aligned(x)


def scales_zeros_bias(
    p: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The tile layout's scales and zeros (T, G, 16), and bias (N,), in x's dtype; no copy if they have it."""

    def cast(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.dtype in (dtype, torch.uint8) else t.to(dtype)  # even a `to` without a conversion costs 3 us

    scales = cast(p.scales)
    assert scales is not None
    return scales, cast(p.zeros), cast(bias)


def rows_of_table(p: PackedWeight) -> int:
    """Rows of W that share a table or a factor: the device code's argument table_rows."""
    return p.N if p.table is None else p.N // p.table.shape[0]


SCALES = {"float": "", "e4m3": " | SCALES_E4M3", "e8m0": " | SCALES_E8M0"}


def table_form(scheme: Scheme, planes: bool = False) -> str:
    """The device code's FORM of values from a table (book.cuh)."""
    return ("E2M1" if scheme.table == "e2m1" else "BOOK_PLANES" if planes else "BOOK") + SCALES[scheme.scale]


def form(scheme: Scheme) -> str:
    """The device code's FORM where it is no more than: no zeros, zeros, or how a table's values are read."""
    return table_form(scheme) if scheme.table else str(int(scheme.zero != "none"))


def tables_of(p: PackedWeight) -> tuple[torch.Tensor | None, int]:
    """Tables or factors, fp32 (tables, width), and how many of p's rows share one; 0: all."""
    books = book(p) if p.scheme.table else None
    return books, 0 if books is None or books.shape[0] == 1 else p.N // books.shape[0]


def book(p: PackedWeight) -> torch.Tensor | None:
    """What the device code reads besides a form, for every `rows_of_table` rows: fp32 tables or e2m1's factors, if any."""
    if p.scheme.table in ("e2m1", "fitted"):
        return p.table
    table = values(p.scheme, None, p.words.device)
    return table if p.table is None else table * p.table  # (T, 1): factors of e4m3 scales


def straddled(p: PackedWeight) -> bool:
    """Whether some row tile has rows of two tables (joined layers of odd sizes), which the device code does not support."""
    return p.table is not None and p.table.shape[0] > 1 and rows_of_table(p) % ROWS > 0


def whole_product(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times the dequantized weight: the slow path for weights that the kernels do not take."""
    return torch.nn.functional.linear(x, unpack(p).dequantize(x.dtype), None if bias is None else bias.to(x.dtype))


def group_argument(p: PackedWeight) -> int:
    """The device code's template argument GROUP: 0 if a row is one group."""
    return 0 if p.scales.shape[1] == 1 else p.scheme.group_size


def groups_of_step(group: int, step: int) -> int:
    """Max. groups that a step of this many k overlaps (the device code's function of that name); group 0: one per row."""
    if group == 0 or group % step == 0:
        return 1
    return step // group if step % group == 0 else (step - 1) // group + 2


def weight_maps(
    p: PackedWeight, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, step: int, tiles: int
) -> tuple[bytes, bytes, bytes]:
    """Tensor maps of words (a box: a chunk of `tiles` row tiles), scales and zeros (T, G, 16; a box: a step's groups); zeros'
    where there are none: scales', as a launch wants one."""
    T, G = scales.shape[0], scales.shape[1]
    width, box = p.words.shape[1], (groups_of_step(group, step) * 16, tiles)
    words = driver.tensor_map(p.words.data_ptr(), 4, width, T, width * 4, (WORDS[p.scheme.bits], tiles), False)
    size = scales.element_size()  # 1 or 2
    metas = driver.tensor_map(scales.data_ptr(), size, G * 16, T, G * 16 * size, box, False)
    return words, metas, metas if zeros is None else driver.tensor_map(zeros.data_ptr(), 2, G * 16, T, G * 32, box, False)


def share_of_block(of_sm: int, blocks: int) -> int:
    """Dynamic shared memory per block: 2 KB are reserved for the driver, barriers and masks."""
    return of_sm // blocks - 2048
