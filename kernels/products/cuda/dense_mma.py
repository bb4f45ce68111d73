"""cuda/dense_mma: a few rows of x by a weight that is not packed. The kernel and its limits are described in dense_mma.cu.

A config: WARPS of a block share K; ROW_TILES of 16 rows of W a block; STEP, k that a warp takes at once; BLOCKS_PER_SM, which
caps the registers. Which of CONFIGS is first is in tuned/, by how many row tiles an SM there are.
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

KEYS = ("WARPS", "ROW_TILES", "STEP", "BLOCKS_PER_SM")
CONFIGS = configs_of(KEYS, ((8, 1, 128, 2), (16, 1, 128, 1), (8, 2, 64, 2), (16, 2, 64, 1), (8, 1, 64, 3), (4, 1, 128, 4)))
PARAMETERS = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int32,) * 3, Folded)
ROWS = 8  # rows of x per block


def expression(dtype: torch.dtype, config: Config, fold: int = 0) -> str:
    """The template instance of dense_mma.cu."""
    return f"dense_mma<{TYPES[dtype]}, {', '.join(str(config[k]) for k in KEYS)}, {fold}>"


@cache
def _kernel(instance: str, device: int, warps: int) -> Kernel:
    on = gpu.here(device)
    return Kernel("dense_mma.cu", instance, device, 32 * warps, PARAMETERS, on.smem_block - 1024, serialize=on.dependent_launch)


def first(call: DenseCall, legal: list[Config], fold: int = 0) -> Config:
    """The config that tuned/ names for this shape if it is legal; else the first legal one.

    Its lists hold (lower bound of row tiles per SM, config): a product that fits runs in one round of blocks that fill the SMs,
    with two steps per warp. A step of an 8B model on an H200 takes 4,094 us with q/k/v in 1.45 rounds of 16 warps, 4,046 us in
    one round of 8 warps.
    """
    on = gpu.of(call.capability)
    file = policy.model("cuda/dense_mma", on)
    rows = "long" if file["long_from_k"] <= call.K else "gated" if fold & GATED else "short"
    values = [values for above, values in file[rows] if above < call.N / 16 / on.sms][-1]
    preferred = dict(zip(KEYS, values, strict=True))
    return preferred if preferred in legal else legal[0]


def _refuse(call: DenseCall) -> str | None:
    return f"takes rows of W that are a multiple of 8, not {call.K}" if call.K % 8 else None


@register(
    "cuda/dense_mma",
    op="dense",
    devices=("cuda",),
    min_capability=gpu.since(lambda g: g.dependent_launch),  # its gain over cuBLAS is that launches follow without gaps
    configs=CONFIGS,
    refuse=_refuse,
    default_config=first,
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
    """dense_mma with the row-wise work of `fold` fused in, as in `tile_mma.launch`."""
    M, (N, K) = x.shape[0], weight.shape
    y = torch.empty(M, N // 2 if fold & GATED else N, dtype=x.dtype, device=x.device)
    x = aligned(x)
    warps, tiles = config["WARPS"], config["ROW_TILES"]
    shared = warps * tiles * 512 + (min(M, ROWS) * K // 4 if fold & NORMED else 0)
    kernel = _kernel(expression(x.dtype, config, fold), x.device.index, warps)
    pointers = (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), x.data_ptr(), y.data_ptr())
    kernel(-(-N // (16 * tiles)), -(-M // ROWS), shared, *pointers, M, N, K, folded)
    return y
