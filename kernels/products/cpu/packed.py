"""cpu/packed: own C++ products over the layout `cpu`, at every width, AVX-512 + VNNI, AVX2 or NEON (product.h).

x is rounded in blocks of 32 to 128 k to 15 bits and a sign, a power of two a block: bf16 values down to 1/64 of their block's
largest are exact, and the rest are off by at most 2^-14 of it, less than bf16 rounds y by. So that everything between is
whole numbers, and y does not depend on M, on threads or on the batch that a row is in.
"""

import ctypes

import torch

from lowq_kernels.dispatch.registry import Call, Config, register
from lowq_kernels.products.cpu import native
from lowq_packers import fp8
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.cpu import chunks

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as args.h numbers them
BLOCKS = (128, 64, 32)  # k that share a scale of x: the first that divides the group


class Args(ctypes.Structure):
    """args.h's struct."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "words", "scales", "zeros", "bias", "most", "y")]
        + [(name, ctypes.c_int32) for name in ("M", "N", "K", "bits", "group", "groups", "chunks")]
        + [(name, ctypes.c_int32) for name in ("block", "blocks", "dtype", "meta", "digits", "threads")]
        + [("mid", ctypes.c_float)]
    )


def _refuse(call: Call) -> str | None:
    return f"own CPU kernels are not in use: {why}" if (why := native.why_not()) else None


@register("cpu/packed", layouts=("cpu",), devices=("cpu",), refuse=_refuse, rank=5)
def packed(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) bf16 or fp16 -> (M, N)."""
    return _product(x, p, bias)


@register("cpu/packed_int8", layouts=("cpu",), devices=("cpu",), refuse=_refuse, acts=("int8",), rank=5)
def packed_int8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """As `packed`, each row of x rounded to 8 bits as `--act int8` says: half the dot products."""
    return _product(x, p, bias, x.abs().amax(1).float().clamp(min=fp8.LEAST))


def _product(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, most: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) @ dequantize(p)^T + bias -> (M, N). most (M,): round rows of x to 8 bits between minus it and it."""
    s, M, lib = p.scheme, x.shape[0], native.library()
    assert lib is not None  # `_refuse` promises it
    y = torch.empty(M, p.N, dtype=x.dtype)
    if M == 0:
        return y
    whole = chunks(p.K) * 32 if s.group_size == p.K else s.group_size
    block = next(b for b in BLOCKS if whole % b == 0)
    if bias is not None:
        bias = bias.to(p.scales.dtype).contiguous()
    pointers = [None if t is None else t.data_ptr() for t in (x, p.words, p.scales, p.zeros, bias, most, y)]
    sizes = (M, p.N, p.K, s.bits, whole, s.groups(p.K), chunks(p.K), block, chunks(p.K) * 32 // block)
    kinds = (DTYPES[x.dtype], DTYPES[p.scales.dtype], 2 if most is None else 1, torch.get_num_threads())
    lib.lowq_cpu_product(native.isa()[0], ctypes.byref(Args(*pointers, *sizes, *kinds, s.mid)))
    return y
