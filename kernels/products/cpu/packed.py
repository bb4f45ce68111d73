"""cpu/packed, cpu/packed_int8: C++ products over the layout `cpu` at every width, by AVX-512 + VNNI, AVX2 or NEON (product.h).

x is rounded to integers of 15 bits and a sign, with a power of two per block of 32 to 128 k. bf16 values down to 1/64 of their
block's largest are exact, and the others are off by at most 2^-14 of it, less than the rounding of y to bf16. All sums are
then of integers, so y does not depend on M, on the number of threads, or on the other rows of the batch.
"""

import torch

from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.products.cpu import native
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.cpu import chunks

BLOCKS = (128, 64, 32)  # k that share a scale of x: the first that divides the group


@register("cpu/packed", layouts=("cpu",), devices=("cpu",), refuse=native.refuse, rank=5)
def packed(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) bf16 or fp16 -> (M, N)."""
    return _product(x, p, bias)


@register("cpu/packed_int8", layouts=("cpu",), devices=("cpu",), refuse=native.refuse, acts=("int8",), rank=5)
def packed_int8(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """As `packed`, with each row of x (M, K) rounded to 8 bits (`--act int8`): half the dot products."""
    return _product(x, p, bias, digits=1)


def _product(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, digits: int = 2) -> torch.Tensor:
    """x (M, K) @ dequantize(p)^T + bias -> (M, N), x as integers of so many digits."""
    M = x.shape[0]
    y = torch.empty(M, p.N, dtype=x.dtype)
    if M == 0:
        return y
    bias = None if bias is None else bias.to(p.scales.dtype).contiguous()
    tensors, sizes = operands(p)
    tensors |= {"x": x, "bias": bias, "y": y}
    native.product(tensors, p.scales.dtype, M=M, **sizes, digits=digits)
    return y


def operands(p: PackedWeight) -> tuple[dict[str, torch.Tensor | None], dict[str, float]]:
    """The tensors of a weight by their names in args.h, and the numbers that follow from its shape."""
    s = p.scheme
    group = chunks(p.K) * 32 if s.group_size == p.K else s.group_size
    block = next(b for b in BLOCKS if group % b == 0)
    sizes = {"N": p.N, "K": p.K, "bits": s.bits, "group": group, "groups": s.groups(p.K), "chunks": chunks(p.K)}
    blocks = {"block": block, "blocks": chunks(p.K) * 32 // block, "mid": s.mid}
    return {"words": p.words, "scales": p.scales, "zeros": p.zeros}, sizes | blocks
