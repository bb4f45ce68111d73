"""LFM2's short convolution: y = C * conv(B * x). In torch and fp32; B * x is rounded to the state's dtype."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lowq_kernels.decode.recurrent import Mixer, States, conv
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Op, capability, register


@dataclass(frozen=True)
class ShortConvCall:
    """A step of M sequences, or a `run` of M tokens of one; width: of the convolution. Kernels: see `recurrent.dispatched`."""

    op: ClassVar[Op] = "short_conv"
    M: int
    run: bool
    channels: int
    width: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class ShortConv:
    """Rows of x: B, C, x. weight (channels, W), bias (channels,) or None: of the convolution. States: "conv" (slots, channels,
    W - 1)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def call(self, x: torch.Tensor, run: bool) -> ShortConvCall:
        """The call of x."""
        channels, width = self.weight.shape
        return ShortConvCall(x.shape[0], run, channels, width, x.dtype, x.device.type, capability(x.device))


def step(x: torch.Tensor, f: ShortConv, states: States, slots: torch.Tensor) -> torch.Tensor:
    """See the package docstring."""
    B, C, u = x.float().chunk(3, -1)
    return (C * conv.step(B * u, f.weight, f.bias, states["conv"], slots)).to(x.dtype)


def run(x: torch.Tensor, f: ShortConv, states: States, slot: int) -> torch.Tensor:
    """See the package docstring."""
    B, C, u = x.float().chunk(3, -1)
    return (C * conv.run(B * u, f.weight, f.bias, states["conv"], slot)).to(x.dtype)


DEFINITION = Mixer(step, run)
register("torch/short_conv", op="short_conv", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)(
    DEFINITION.either
)
