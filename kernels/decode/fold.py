"""The row-wise work of a decode step fused into its products: residual add, RMSNorm and act(gate) * up (fold.cuh).

Packed weights run in cuda/tile_mma, 16-bit weights in cuda/dense_mma.

    norm_product        RMSNorm(x) W^T, without a kernel for the norm
    norm_product_gate   act(gate) * up of the same
    product_gate        act(gate) * up of an x that is already normed
    product_add         x += y W^T, and the inputs of the next `norm_product` or `norm_product_gate`

A layer then takes five launches instead of eight. Only for one row: every block of a `norm_product` reads all sums of squares.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import nn

from lowq_kernels.cuda.driver import UNFOLDED
from lowq_kernels.cuda.operands import straddled
from lowq_kernels.dispatch import policy
from lowq_kernels.dispatch.registry import Call, Config, Op, find, kernels, named, refusals, register, select
from lowq_kernels.modules.dense import Dense
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cuda import dense_mma, tile_mma
from lowq_kernels.products.cuda.tile_mma import ADDED, GATED, NORMED
from lowq_kernels.products.dense_call import DenseCall
from lowq_packers.layouts import PackedWeight
from lowq_packers.layouts.tile import padded_rows

# Max. rows that are fused. An 8B model on an H100, us per step, fused (not fused): one row in 4 bits 1787 (1831), in 2 bits
# 1267 (1310); four rows in 4 bits 2011 (1973).
MOST_ROWS = 1
FOLDED = struct.Struct("@6Qf4x")  # fold.cuh's Folded
SQUARES = 16  # features per partial sum of squares
ACTS = {"silu": tile_mma.SILU, "gelu_tanh": tile_mma.GELU_TANH}
KERNEL, DENSE = "cuda/tile_mma", "cuda/dense_mma"


@dataclass(frozen=True)
class Residual:
    """A residual stream r (M, K) before its next norm: x = r * weight * scale, rounded, and the sums of squares of r.

    x (M, K) of the model's dtype; squares (M, K / 16) and scale (M,) fp32; eps of the norm. RMSNorm(r) is x / scale / rms(r).
    """

    x: torch.Tensor
    squares: torch.Tensor
    scale: torch.Tensor
    eps: float


@dataclass(frozen=True)
class FoldedCall:
    """A product with fused row-wise work. fold: a sum of tile_mma's bits. kernel: the kernel its layer forces, or None.

    Its kernels are launch(x, p, bias, fold, folded, config) -> y, p a PackedWeight or a weight (N, K), `folded` the bytes of
    fold.cuh's Folded.
    """

    op: ClassVar[Op] = "folded"
    product: Call | DenseCall
    fold: int
    kernel: str | None

    M = property(lambda self: self.product.M)
    dtype = property(lambda self: self.product.dtype)
    device = property(lambda self: self.product.device)
    capability = property(lambda self: self.product.capability)


def _refuse(call: FoldedCall, kind: type, kernel: str) -> str | None:
    c, fold = call.product, call.fold
    if type(c) is not kind:
        return "takes weights that are packed" if kind is Call else "takes weights in 16 bits"
    if fold & NORMED and c.K % (4 * SQUARES):
        return f"takes rows of x that are a multiple of {4 * SQUARES}, not {c.K}"
    rows = c.N // 2 if fold & GATED else c.N
    if fold & ~NORMED and padded_rows(rows) != rows:
        return f"takes whole row tiles, not {rows} rows"
    name = select(c, call.kernel)[0].name
    if name != kernel:
        return f"{name} computes this product"
    return None if isinstance(c, DenseCall) or _config(c, call.kernel, fold) else "no config of it fits this shape"


def _dense_config_refuse(call: FoldedCall, config: Config) -> str | None:
    return "gate and up need pairs of row tiles" if call.fold & GATED and config["ROW_TILES"] % 2 else None


def _dense_config(call: FoldedCall, legal: list[Config]) -> Config:
    assert isinstance(call.product, DenseCall)
    return dense_mma.first(call.product, legal, call.fold)


@register(
    "cuda/dense_mma_folded",
    op="folded",
    devices=("cuda",),
    configs=dense_mma.CONFIGS,
    refuse=partial(_refuse, kind=DenseCall, kernel=DENSE),
    config_refuse=_dense_config_refuse,
    default_config=_dense_config,
)
def folded_dense(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fold: int, folded: bytes, config: Config
) -> torch.Tensor:
    """`folded_product` by a weight (N, K) in 16 bits."""
    return dense_mma.launch(x, weight, bias, config, fold, folded)


@register(
    "cuda/tile_mma_folded",
    op="folded",
    configs=named(KERNEL).configs,
    refuse=partial(_refuse, kind=Call, kernel=KERNEL),
    config_refuse=lambda call, config: named(KERNEL).config_refuse(call.product, config),
    default_config=lambda call, legal: _config(call.product, call.kernel, call.fold),
)
def folded_product(
    x: torch.Tensor, p: PackedWeight, bias: torch.Tensor | None, fold: int, folded: bytes, config: Config
) -> torch.Tensor:
    """x (M, K), or a stream's, -> (M, N), or (M, N / 2) of gate and up."""
    return tile_mma.launch(x, p, bias, config, fold, folded)


def why_not(layer: nn.Module, M: int, dtype: torch.dtype, fold: int) -> str | None:
    """Why a product of M rows cannot fuse `fold` (a sum of tile_mma's bits), or None."""
    packed = type(layer) is QuantLinear and not layer.in_blocks
    if not (packed or type(layer) is Dense) or not layer.weight.is_cuda:
        return "takes layers on a GPU, packed or in 16 bits"
    if M > MOST_ROWS:  # fewer than those whose inputs layers round
        return f"takes up to {MOST_ROWS} rows, not {M}"
    if isinstance(layer, QuantLinear) and straddled(layer.packed):
        return "row tiles of two tables"
    if not packed and layer.weight.dtype != dtype:
        return f"takes weights of {dtype}, not {layer.weight.dtype}"
    call = _call(layer, M, dtype, fold)
    return None if find(call) else "; ".join(refusals(call).values())


def _call(layer: nn.Module, M: int, dtype: torch.dtype, fold: int) -> FoldedCall:
    if isinstance(layer, Dense):
        return FoldedCall(DenseCall.of(M, layer.weight), fold, None)
    assert isinstance(layer, QuantLinear)
    return FoldedCall(Call.of(layer.weight.new_empty(M, 0, dtype=dtype), layer.packed), fold, layer.kernel)


def config_of(layer: QuantLinear | Dense, M: int, dtype: torch.dtype, fold: int) -> Config:
    """The config of the product with `fold` fused in."""
    return select(_call(layer, M, dtype, fold))[1]


def norm_product(layer: QuantLinear | Dense, s: Residual) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of the stream times the layer's weight (M, N), the norm's rsqrt (M,))."""
    return _of_residual(layer, s, NORMED)


def norm_product_gate(layer: QuantLinear | Dense, s: Residual, act: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norm_product`, gate and up side by side in the layer, and act(gate) * up of them (M, N / 2)."""
    return _of_residual(layer, s, NORMED | ACTS[act])


def product_gate(layer: QuantLinear | Dense, x: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up (M, N / 2) of x (M, K), gate and up side by side in the layer."""
    return _launch(layer, x, ACTS[act], UNFOLDED)


def product_add(
    layer: QuantLinear | Dense, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor
) -> Residual:
    """residual (M, N) += x times the layer's weight, in place; the stream for the norm of `weight` (N,) and eps.

    scale: (M,) the rsqrt of an earlier norm of this residual, or ones.
    """
    squares = torch.empty(x.shape[0], layer.out_features // SQUARES, dtype=torch.float32, device=x.device)
    folded = FOLDED.pack(0, scale.data_ptr(), 0, residual.data_ptr(), weight.data_ptr(), squares.data_ptr(), eps)
    return Residual(_launch(layer, x, ADDED, folded), squares, scale, eps)


def _of_residual(layer: QuantLinear | Dense, s: Residual, fold: int) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = torch.empty_like(s.scale)
    folded = FOLDED.pack(s.squares.data_ptr(), s.scale.data_ptr(), inverse.data_ptr(), 0, 0, 0, s.eps)
    return _launch(layer, s.x, fold, folded), inverse


def _launch(layer: QuantLinear | Dense, x: torch.Tensor, fold: int, folded: bytes) -> torch.Tensor:
    spec, config = select(_call(layer, x.shape[0], x.dtype, fold))
    return spec.launch(x, layer.weight if isinstance(layer, Dense) else layer.packed, layer.bias, fold, folded, config)


def _config(call: Call, kernel: str | None, fold: int) -> Config | None:
    """The config that dispatch chooses (for gate and up: one with pairs of row tiles), or None."""
    config = select(call, kernel)[1]
    if not fold & GATED:
        return config
    even = config if config["ROW_TILES"] % 2 == 0 else None
    return even if even and even != _alone(call) else _pairs(call) or even


@lru_cache(1024)
def _alone(call: Call) -> Config:
    """The config that the rule chooses for the same product without fusing."""
    return select(call, KERNEL)[1]


@lru_cache(1024)
def _pairs(call: Call) -> Config | None:
    """The first legal shipped config of this width. Gate and up need pairs of row tiles, and blocks that leave room on the SM
    for the next product's blocks; a config that is fast alone may not. The shipped order was measured in whole steps."""
    legal = kernels()[KERNEL].legal_configs(call)
    return next((pairs for pairs in policy.gate_up(call, tile_mma.KEYS) if pairs in legal), None)
