"""cuda/prompt: prompt.cu, for heads of 64 and 128 dims over caches in 16 bits on Hopper.

Microseconds on an H200 (in parentheses cuDNN), 32 query heads on 8 key heads of 128 dims: 2,048 tokens 69 (83), 8,192 tokens
816 (923), which is 673 TFLOP/s; 2,048 tokens after 30,720 others 1,487, in prompt.py 2,357.
"""

import ctypes
import math
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import Kernel, TensorMap, tensor_map
from lowq_kernels.cuda.operands import TYPES
from lowq_kernels.decode.attend import usual
from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.prompt_call import PromptCall, Sizes
from lowq_kernels.decode.reference import TILE, Heads, Packed
from lowq_kernels.dispatch.registry import Config, register

PARAMETERS = (TensorMap, TensorMap, *(ctypes.c_void_p,) * 6, *(ctypes.c_int32,) * 7, ctypes.c_float)
THREADS = 384
SLOTS, PIECE = 128, 64  # slots per tile, and per TMA copy
STAGES = {64: 4, 128: 3}  # head dim -> tiles in flight


def _refuse(call: PromptCall) -> str | None:
    if why := usual(call) or gpu.no_wgmma(call.capability):
        return why
    if call.D not in STAGES or call.kv != PLAIN or call.page % PIECE:
        return f"takes heads of 64 or 128 over 16 bits in blocks of whole {PIECE} slots, not D={call.D}, {call.kv}, {call.page}"
    return None


@cache
def _kernel(instance: str, device: int, smem: int) -> Kernel:
    return Kernel("prompt.cu", instance, device, THREADS, PARAMETERS, smem)


@register("cuda/prompt", op="prompt", rank=30, refuse=_refuse)
def attend(
    y: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, p: Packed | None, h: Heads, sizes: Sizes, config: Config
) -> torch.Tensor:
    """See `PromptCall`."""
    T, start, S, width = sizes
    page, rows = 0 if p is None else S, k_cache.shape[0] * h.HKV * S
    blocks, sequences = (math.ceil(T / TILE), y.shape[0] // T) if p is None else (p.tiles.shape[0], 1)
    smem = STAGES[h.D] * 2 * SLOTS * h.D * 2
    kernel = _kernel(f"attend_prompt<{TYPES[y.dtype]}, {h.D}, {page}, {STAGES[h.D]}>", y.device.index, smem)
    maps = (tensor_map(c.data_ptr(), 2, h.D, rows, h.D * 2, (64, PIECE), True) for c in (k_cache, v_cache))
    of_tokens = (0, 0, 0, 0) if p is None else (t.data_ptr() for t in (p.rows, p.pos, p.table, p.tiles))
    sinks, window = 0 if h.sinks is None else h.sinks.data_ptr(), h.window or 1 << 30
    kernel(
        sequences * h.HQ, blocks, smem, *maps, *of_tokens, sinks, y.data_ptr(),
        T, start, S, width, window, h.HQ, h.HKV, h.scale * LOG2E,
    )  # fmt: skip
    return y
