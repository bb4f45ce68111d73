"""Programmatic dependent launch: start while the previous kernel drains, and fetch weights, which do not depend on it.

On Hopper a kernel launched with `launch_pdl` may start before its predecessor ends. Weights can then already be asked
into the second-level cache; x, and memory the predecessor may still use, wait for `gdc_wait`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFETCH_ROWS = tl.constexpr(64)  # word rows that are prefetched, 16 KiB for 64 columns: about what hides a launch


@triton.jit
def overlap_previous(words_ptr, row_begin, row_end, n_begin, N, BLOCK_N: tl.constexpr):
    """Prefetch the first word rows of this program, wait for the previous kernel, then let the next one start."""
    LINE: tl.constexpr = 32  # words in a 128-byte line
    LINES: tl.constexpr = BLOCK_N // LINE if BLOCK_N > LINE else 1
    rows = tl.minimum(row_begin + tl.arange(0, PREFETCH_ROWS), row_end - 1)
    columns = tl.minimum(n_begin + tl.arange(0, LINES) * LINE, N - 1)
    addresses = words_ptr + rows[:, None] * tl.cast(N, tl.int64) + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
    gdc_wait()
    gdc_launch_dependents()
