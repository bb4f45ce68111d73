"""cpu/int4: torch's packed 4-bit matmul, for 4, 3, 2 and 1-bit weights in one plane and 8-bit weights in two.

A library's kernel and good enough: 4096x4096 at M = 1 takes 0.9 ms against 2.5 ms for the bf16 linear (2 cores, AVX-512,
no AMX). bf16 only: the same op in fp16 or fp32 is 30 to 80 times slower, so those dtypes go to `dequant`.
"""

import torch

from lowq_kernels.dispatch.registry import Config, register
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.cpu_int4 import torch_group


@register("cpu/int4", layouts=("cpu_int4",), devices=("cpu",), dtypes=(torch.bfloat16,), rank=10)
def cpu_int4(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) bf16 -> (M, N) bf16; weights are rounded to bf16 on the way, sums are fp32 within a plane."""
    group = torch_group(p.scheme.group_size)
    assert group is not None  # cpu_int4's why_not promises it
    assert p.aux is not None  # and its pack this
    y = torch._weight_int4pack_mm_for_cpu(x, p.words[0], group, p.aux[0])
    for plane in range(1, p.words.shape[0]):
        y += torch._weight_int4pack_mm_for_cpu(x, p.words[plane], group, p.aux[plane])
    y = y[:, : p.N]
    return y if bias is None else y + bias.to(y.dtype)
