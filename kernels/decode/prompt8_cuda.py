"""cuda/prompt8: prompt8.cu, attention of prompts in e4m3 under `--act fp8`, for heads of 128 dims over 16 bits on Hopper."""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode.attend import usual
from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.prompt_call import PromptCall, Sizes
from lowq_kernels.decode.reference import TILE, Heads, Packed
from lowq_kernels.dispatch.registry import Config, register

POINTER, INT = ctypes.c_void_p, ctypes.c_int32
CODES = ((POINTER,) * 9 + (INT,) * 5, (POINTER,) * 6 + (INT,) * 4 + (ctypes.c_float,))  # of prompt_codes, attend_prompt8
D, UNIT = 128, 128  # dims of a head; slots that share scales
UNIT_BYTES, SCALES = 2 * UNIT * D, 4  # of a unit and key head: codes of keys and values; fp32 numbers
STAGES = 5  # units in flight: 160 KB
SHARES = 4  # blocks per tile of tokens that make codes of a sequence: its cache is long where its new tokens are few
LEAST = 1281  # min. tokens of a pass: shorter ones may be recorded in CUDA graphs, for any length of their sequences
# Min. units of a sequence on average. On an H200 with 32 heads on 8 key heads 2,048 tokens take 72 us vs 68 us in 16 bits, in a
# server's pass 4,096 take 236 vs 236 us, 8,192 700 vs 788 us, 4,096 behind 28,672 others 2,275 vs 2,741 us.
LONG = 48
MOST_UNITS = 1024  # max. of a pass: at 8 key heads 0.27 GB of codes, less than an 8B's gates of 4,096 tokens, which come later


def _refuse(call: PromptCall) -> str | None:
    if why := usual(call) or gpu.no_wgmma(call.capability):
        return why
    # units is 0 where the host knows of no sequence, as in a pass that is recorded: a replay may have any, and codes need room
    if call.act != "fp8" or call.M < LEAST or not 0 < LONG * call.sequences <= call.units <= MOST_UNITS:
        where = f"sequences have {LONG * UNIT} slots and more on average and at most {MOST_UNITS * UNIT} in all"
        return f"takes passes of {LEAST} tokens and more under --act fp8 whose {where}"
    if call.D != D or call.kv != PLAIN or call.page % 64:
        return f"takes heads of {D} over 16 bits in blocks of whole 64 slots, not D={call.D}, {call.kv}, {call.page}"
    return None


@cache
def _kernel(instance: str, device: int, smem: int) -> Kernel:
    coder = instance.startswith("prompt_codes")
    return Kernel("prompt8.cu", instance, device, 256 if coder else 384, CODES[not coder], smem)


def _instances(T: int, page: int, paged: bool) -> tuple[str, str]:
    return f"prompt_codes<{T}, {page}>", f"attend_prompt8<{T}, {str(paged).lower()}, {STAGES}>"


def _load(call: PromptCall, device: torch.device) -> None:
    for instance, smem in zip(_instances(TYPES[call.dtype], call.page, call.page > 0), (0, STAGES * UNIT_BYTES), strict=True):
        _kernel(instance, device.index, smem)


@register("cuda/prompt8", op="prompt", rank=20, refuse=_refuse, load=_load)
def attend(
    y: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, p: Packed | None, h: Heads, sizes: Sizes, config: Config
) -> torch.Tensor:
    """See `PromptCall`."""
    T, start, S, width = sizes
    page, type_ = 0 if p is None else S, TYPES[y.dtype]
    blocks, sequences = (math.ceil(T / TILE), y.shape[0] // T) if p is None else (p.tiles.shape[0], 1)
    each = math.ceil((start + T) / UNIT) if p is None else 0  # units of a sequence
    units = sequences * each if p is None else p.units
    codes = torch.empty(units, h.HKV, UNIT_BYTES, dtype=torch.uint8, device=y.device)
    scales = torch.empty(units, h.HKV, SCALES, dtype=torch.float32, device=y.device)
    bases = torch.empty(blocks, dtype=torch.int32, device=y.device)
    rows, pos, table, tiles = (0, 0, 0, 0) if p is None else (t.data_ptr() for t in (p.rows, p.pos, p.table, p.tiles))
    per, of = (each, sequences) if p is None else (SHARES, blocks)
    coder, attends = _instances(type_, page, p is not None)
    _kernel(coder, y.device.index, 0)(
        per * of, h.HKV, 0, k_cache.data_ptr(), v_cache.data_ptr(), rows, pos, table, tiles, codes.data_ptr(),
        scales.data_ptr(), bases.data_ptr(), start + T if p is None else 0, S, width, h.HKV, per,
    )  # fmt: skip
    _kernel(attends, y.device.index, STAGES * UNIT_BYTES)(
        sequences * h.HQ, blocks, STAGES * UNIT_BYTES, codes.data_ptr(), scales.data_ptr(), bases.data_ptr(), pos, tiles,
        y.data_ptr(), 1 << 30 if p is not None else T, start, h.HQ, h.HKV, h.scale * LOG2E,
    )  # fmt: skip
    return y
