"""act(gate) * up, or a norm, rounded to 8 bits by the launch that computes it, and the product behind it (`--act`)."""

import torch

from lowq_kernels.activations import act_of
from lowq_kernels.dispatch.registry import Call, select
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cuda import tile_wgmma8

KERNELS = ("cuda/tile_int8", "cuda/tile_fp8")
# Min. rows for which a norm rounds what it makes. Rows of 4,096 values by two launches and by one, us on an H200: of 4,096 rows
# 50.2 and 43.0, of 1,024 rows 12.7 and 12.8, of 384 rows 6.2 and 6.7.
LEAST_NORMED = 2048


def gate_product(layer: object, gate_up: torch.Tensor, act: str) -> torch.Tensor | None:
    """layer(act(gate) * up) (M, N) of gate_up (M, 2 K), or None where no kernel does both."""
    if not isinstance(layer, QuantLinear) or layer.in_blocks or act not in tile_wgmma8.GATES:
        return None
    mode, p = act_of(layer.act, gate_up.shape[0]), layer.packed
    if mode == "none" or not tile_wgmma8.block_of(p.K)[0]:
        return None
    spec, config = select(Call.of(gate_up, p, mode), layer.kernel)
    return tile_wgmma8.product(gate_up, p, layer.bias, config, mode == "int8", act) if spec.name in KERNELS else None


def norm_product(
    layer: object, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor | None:
    """layer(norm(x + delta)) (M, N), x (M, K) changed in place, or None, and x as it was, where no kernel does both."""
    if not isinstance(layer, QuantLinear) or layer.in_blocks or weight.dtype != x.dtype or not x.is_contiguous():
        return None
    mode, p = act_of(layer.act, x.shape[0]), layer.packed
    if mode == "none" or x.shape[0] < LEAST_NORMED or p.K % 8 or not tile_wgmma8.block_of(p.K)[0] or x.data_ptr() % 16:
        return None
    spec, config = select(Call.of(x, p, mode), layer.kernel)
    if spec.name not in KERNELS:
        return None
    return tile_wgmma8.multiply(tile_wgmma8.normed(x, delta, weight, eps, p, mode == "int8"), p, layer.bias, config, p.N)
