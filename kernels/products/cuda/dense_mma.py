"""cuda/dense_mma: a few rows of x by a weight that is not packed. The kernel and its limits are described in dense_mma.cu.

A config: WARPS of a block share K; ROW_TILES of 16 rows of W a block; STEP, k that a warp takes at once; BLOCKS_PER_SM, which
caps the registers; AHEAD, a warp's steps of W on their way before the wait for the kernel before; L2_AHEAD, k more of each row
that L2 is asked for. Which of CONFIGS is first is in tuned/: "wide", "narrow", and of folded ones "folded" and "gated".
"""

import ctypes
from functools import cache

import torch

from lowq_kernels import gpu
from lowq_kernels.cuda.driver import UNFOLDED, Folded, Kernel
from lowq_kernels.cuda.operands import TYPES, aligned
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Config, configs_of, register
from lowq_kernels.products.cuda.tile_mma import GATED, NORMED
from lowq_kernels.products.dense_call import DenseCall

KEYS = ("WARPS", "ROW_TILES", "STEP", "BLOCKS_PER_SM", "AHEAD", "L2_AHEAD")
SHAPES = ((8, 1, 128, 2), (16, 1, 128, 1), (8, 2, 64, 2), (16, 2, 64, 1), (8, 1, 64, 3), (4, 1, 128, 4))
CONFIGS = configs_of(KEYS, tuple((*shape, *ahead) for ahead in ((1, 0), (2, 0), (2, 1024)) for shape in SHAPES))
PARAMETERS = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int32,) * 3, Folded)
ROWS = 8  # of x a block


def expression(dtype: torch.dtype, config: Config, fold: int = 0) -> str:
    """The template instance of dense_mma.cu."""
    return f"dense_mma<{TYPES[dtype]}, {', '.join(str(config[k]) for k in KEYS)}, {fold}>"


@cache
def _kernel(instance: str, device: int, warps: int) -> Kernel:
    on = gpu.here(device)
    return Kernel("dense_mma.cu", instance, device, 32 * warps, PARAMETERS, on.smem_block - 1024, serialize=on.dependent_launch)


def first(call: DenseCall, legal: list[Config], narrow: str) -> Config:
    """The config that tuned/ names for wide calls or as `narrow`, where it is legal; else the first that is.

    Wide are rows that are long, and so many that pairs of row tiles fill the GPU: blocks of 16 warps and two tiles. An 8B's
    step on an H100 takes 5,433 us so and 5,568 by blocks of 8 warps and one tile, a 1B's 1,023 and 1,005.
    """
    on = gpu.of(call.capability)
    file = policy.model("cuda/dense_mma", on)
    wide = file["wide_from_k"] <= call.K and file["wide_blocks_an_sm"] * on.sms <= call.N / 32
    asked = dict(zip(KEYS, file["wide" if wide else narrow], strict=True))
    return asked if asked in legal else legal[0]


def _refuse(call: DenseCall) -> str | None:
    return f"takes rows of W that are a multiple of 8, not {call.K}" if call.K % 8 else None


@register(
    "cuda/dense_mma",
    op="dense",
    devices=("cuda",),
    min_capability=gpu.since(lambda g: g.dependent_launch),  # what it gains over cuBLAS is a chain of launches without gaps
    configs=CONFIGS,
    refuse=_refuse,
    default_config=lambda call, legal: first(call, legal, "narrow"),
)
def dense_mma(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) by weight (N, K), fp16 or bf16 -> (M, N): fp32 sums, rounded once."""
    return launch(x, weight, bias, config)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    fold: int = 0,
    folded: bytes = UNFOLDED,
) -> torch.Tensor:
    """dense_mma, doing what the bits of `fold` say for its neighbours, as `tile_mma.launch` does."""
    M, (N, K) = x.shape[0], weight.shape
    y = torch.empty(M, N // 2 if fold & GATED else N, dtype=x.dtype, device=x.device)
    x = aligned(x)
    warps, tiles = config["WARPS"], config["ROW_TILES"]
    shared = warps * tiles * 512 + (min(M, ROWS) * K // 4 if fold & NORMED else 0)
    kernel = _kernel(expression(x.dtype, config, fold), x.device.index, warps)
    pointers = (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), x.data_ptr(), y.data_ptr())
    kernel(-(-N // (16 * tiles)), -(-M // ROWS), shared, *pointers, M, N, K, folded)
    return y
