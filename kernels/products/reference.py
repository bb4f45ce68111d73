"""reference: dequantize the whole weight, multiply in fp32. The definition for every test, on any device and layout.

Chosen only by name or where no other kernel takes the call: it holds all weights in fp32 at once.
"""

import torch

from lowq_kernels.dispatch.registry import ANY_TABLE, LAST_RESORT, Config, register
from lowq_packers.layouts import LAYOUTS, PackedWeight, unpack


@register(
    "reference",
    layouts=tuple(LAYOUTS),
    tables=ANY_TABLE,
    devices=("cpu", "cuda"),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    rank=LAST_RESORT,
)
def reference(x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, config: Config) -> torch.Tensor:
    """x (M, K) -> (M, N): fp32 throughout, rounded once to x's dtype."""
    y = x.float() @ unpack(p).dequantize().t()
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)
