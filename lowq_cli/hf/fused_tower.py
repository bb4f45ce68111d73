"""Parts of transformers' vision towers that a GPU computes in one kernel instead of several: rotations, and patches.

A tower's modules are found by what their code calls, and a rotation is replaced where it computes what `rotate_heads` defines,
to the bit. The modules of this tower alone get other forwards; transformers' own functions stay as they are.
"""

from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lowq_kernels.modules.rotation import definition, rotate_heads

GIVEN = ["q", "k", "cos", "sin"]
DIM = "unsqueeze_dim"  # an argument: the axis of q that cos and sin lack
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse(tower: nn.Module) -> None:
    """Let the modules of a tower compute rotations and patches in one kernel each."""
    for module in tower.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and _without_overlap(module):
            module.forward = MethodType(patches, module)  # type: ignore[method-assign]  # of this module alone
        elif (forward := _fused(type(module))) is not None:  # type: ignore[arg-type]  # a class is hashable
            module.forward = MethodType(forward, module)


def _without_overlap(conv: nn.Conv2d | nn.Conv3d) -> bool:
    plain = conv.stride == conv.kernel_size and conv.groups == 1 and {*conv.dilation} == {1}
    return plain and conv.padding in ("valid", (0,) * len(conv.kernel_size))


def patches(conv: nn.Conv2d | nn.Conv3d, x: torch.Tensor) -> torch.Tensor:
    """A convolution whose patches do not overlap, as one product: cuDNN takes 1.0 ms for 4,096 patches of 1,536 values."""
    counts = [size // k for size, k in zip(x.shape[2:], conv.kernel_size, strict=True)]
    for axis, (count, k) in enumerate(zip(counts, conv.kernel_size, strict=True), 2):
        x = x.narrow(axis, 0, count * k)
    n = len(counts)
    x = x.reshape(*x.shape[:2], *(size for pair in zip(counts, conv.kernel_size, strict=True) for size in pair))
    x = x.permute(0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2)).flatten(1 + n)
    return functional.linear(x, conv.weight.flatten(1), conv.bias).movedim(-1, 1)


@cache
def _fused(cls: type[nn.Module]) -> FunctionType | None:
    """The forward of a class with its rotation replaced; None if it calls none."""
    forward = cls.forward
    if not isinstance(forward, FunctionType):
        return None
    there = {n: forward.__globals__.get(n) for n in forward.__code__.co_names}
    found = {n: r for n, f in there.items() if isinstance(f, FunctionType) and (r := rotation(f)) is not None}
    if not found:
        return None
    made = FunctionType(
        forward.__code__, {**forward.__globals__, **found}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@cache
def rotation(function: FunctionType) -> Rotation | None:
    """What computes the same as a function of q, k, cos, sin with `rotate_heads`; None where that is something else."""
    parameters = signature(function).parameters
    if [*parameters][:4] != GIVEN or any(p.default is Parameter.empty for n, p in parameters.items() if n not in GIVEN):
        return None
    wide = next((w for w in (True, False) if _same(function, w, DIM in parameters)), None)
    if wide is None:
        return None

    def rotated(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        more = signature(function).bind(q, k, cos, sin, *args, **kwargs)
        more.apply_defaults()
        axis = more.arguments.get(DIM, -2)
        four = (q, k, cos.unsqueeze(axis), sin.unsqueeze(axis))
        if not _taken(four, wide):
            return function(q, k, cos, sin, *args, **kwargs)
        y, z = rotate_heads(*(t[0] if t.dim() == 4 else t for t in four), wide)
        return y.view(q.shape), z.view(q.shape)

    return rotated


def _taken(four: tuple[torch.Tensor, ...], wide: bool) -> bool:
    """Whether `rotate_heads` takes q, k, cos and sin, of one batch."""
    q, k, cos, sin = four
    sizes = q.dim() in (3, 4) and q.shape == k.shape and cos.shape == sin.shape and cos.shape[-1] == q.shape[-1]
    one = all(t.dim() < 4 or (t.dim() == 4 and t.shape[0] == 1) for t in four)
    return sizes and one and q.shape[-1] % 2 == 0 and len({t.dtype for t in (four[:2] if wide else four)}) == 1


def _same(function: Rotation, wide: bool, named: bool) -> bool:
    """Whether the function has the bits of the definition for random bf16 values."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(5, 3, 8, generator=g).bfloat16() for _ in range(2))
    cos, sin = (torch.randn(5, 8, generator=g).bfloat16() for _ in range(2))
    more = {DIM: 1} if named else {}
    try:
        made = function(q, k, cos, sin, **more)
    except (RuntimeError, TypeError, ValueError, IndexError):  # a function of other tensors; the tower keeps it
        return False
    wanted = [definition(x, cos[:, None], sin[:, None], wide) for x in (q, k)]
    return isinstance(made, tuple) and len(made) == 2 and all(map(torch.equal, made, wanted))
