"""Fp8Linear: a linear layer whose weight is e4m3 with block scales, as DeepSeek's and transformers' fp8 checkpoints hold it.

Its tensors are `weight` (N, K) float8_e4m3fn, `weight_scale_inv` fp32 (which multiplies, whatever its name says) and `bias`.
On a device without FP8 hardware `prepare` widens the weight once; activations are then rounded to fp8 and back, so that the
numbers are those of the hardware up to the order of sums.
"""

import torch
from torch import nn
from torch.nn.functional import linear

from lowq_kernels.activations import Act, check_act, rounded
from lowq_kernels.fp8.matmul import GROUP, has_fp8, kernel_for, matmul
from lowq_kernels.modules.ops import through_autograd
from lowq_packers.errors import SchemeError, UnsupportedError
from lowq_packers.fp8 import FP8, Fp8Matrix
from lowq_packers.scheme import Block, scale_shape


class Fp8Linear(nn.Module):
    """y = x @ W^T + bias, x (..., K) -> (..., N).

    Args:
        N, K: out_features, in_features.
        block: rows and columns of W that share a scale.
        bias: whether there is one.
        dtype: of bias, and of the widened weight.
        act: "fp8" rounds activations to groups of 128 per token; "none" leaves them.
    """

    def __init__(
        self,
        N: int,
        K: int,
        block: Block,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        act: Act = "fp8",
    ) -> None:
        super().__init__()
        self.out_features, self.in_features, self.block, self.dtype = N, K, block, dtype
        self.weight = nn.Parameter(torch.zeros(N, K, dtype=FP8, device=device), requires_grad=False)
        scales = torch.ones(scale_shape((N, K), block), dtype=torch.float32, device=device)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(N, dtype=dtype, device=device), requires_grad=False) if bias else None
        self.act: Act = "fp8"
        self.set_act(act)

    @classmethod
    def from_matrix(
        cls, w: Fp8Matrix, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16, act: Act = "fp8"
    ) -> "Fp8Linear":
        """A ready layer that takes over a quantized weight, on its device."""
        layer = cls(w.q.shape[0], w.q.shape[1], w.block, bias is not None, dtype, "meta", act)
        layer.weight = nn.Parameter(w.q, requires_grad=False)
        layer.weight_scale_inv = nn.Parameter(w.scales, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(w.q.device, dtype), requires_grad=False)
        return layer.prepare()

    def set_act(self, act: Act) -> None:
        """Change how activations are rounded. Raises UnsupportedError for int8: no hardware multiplies it by fp8."""
        if check_act(act) == "int8":
            raise UnsupportedError("fp8 weights take activations in fp8 or as they are, not in int8; use --act fp8 or none")
        self.act = act

    @property
    def widened(self) -> bool:
        """Whether the weight is held in 16 bits, for want of FP8 hardware."""
        return self.weight.dtype != FP8

    @property
    def kernel(self) -> str:
        """What multiplies: for `--explain`."""
        return "torch (widened)" if self.widened else kernel_for(self.matrix, self.act)

    @property
    def matrix(self) -> Fp8Matrix:
        """The weight as it is stored. Raises SchemeError once it is widened."""
        if self.widened:
            raise SchemeError("this layer's weight was widened for a device without FP8")
        return Fp8Matrix(self.weight.data, self.weight_scale_inv.data, self.block)

    def prepare(self, dtype: torch.dtype | None = None) -> "Fp8Linear":
        """Ready the weight for its device. Called after loading; idempotent."""
        if self.weight.is_meta:
            raise SchemeError("Fp8Linear holds no weight yet (meta device); load a state dict first")
        self.dtype = dtype or self.dtype
        if not self.widened and not has_fp8(self.weight.device):
            self.weight = nn.Parameter(self.matrix.dequantize(self.dtype), requires_grad=False)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N), in x's dtype."""
        if x.shape[-1] != self.in_features:
            raise SchemeError(f"x has {x.shape[-1]} features, the layer takes K={self.in_features}")
        flat = x.reshape(-1, self.in_features)
        if self.widened:
            group = GROUP if self.block[0] > 1 else None
            bias = None if self.bias is None else self.bias.to(x.dtype)
            y = linear(rounded(flat, self.act, group), self.weight.to(x.dtype), bias)
        elif through_autograd(flat):
            y = _linear(flat, self.weight, self.weight_scale_inv, self.bias, list(self.block), self.act)
        else:
            y = matmul(flat, self.matrix, self.bias, self.act)
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        held = "widened" if self.widened else "fp8"
        blocks = f"{self.block[0]}x{self.block[1]}"
        return f"{self.in_features}, {self.out_features}, blocks={blocks}, act={self.act}, {held}, bias={self.bias is not None}"


@torch.library.custom_op("lowq::fp8_linear", mutates_args=())
def _linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, block: list[int], act: str
) -> torch.Tensor:
    """`matmul` for compiled graphs."""
    return matmul(x, Fp8Matrix(weight, scales, (block[0], block[1])), bias, check_act(act))


@_linear.register_fake
def _(x, weight, scales, bias, block, act):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0])
