"""Parts of transformers' vision towers that a GPU computes in one kernel instead of several: rotations, and patches.

A tower's modules are found by what their code calls, and a rotation is replaced where it computes what `rotate_heads` defines,
to the bit. The modules of this tower alone get other forwards; transformers' own functions stay as they are.
"""

from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lowq_kernels.modules.rotation import definition, rotate_heads

AXIS = "unsqueeze_dim"  # an argument: the axis of q that cos and sin lack
Rotation = Callable[..., Any]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    """What computes the same as a function with `rotate_heads`; None where that is something else."""
    names = tuple(signature(function).parameters)
    form = next((form for given, form in FORMS.items() if names[: len(given)] == given), None)
    wide = None if form is None else next((w for w in (True, False) if _same(function, form, w, AXIS in names)), None)
    if form is None or wide is None:
        return None

    def rotated(*args: Any, **kwargs: Any) -> Any:
        given = signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        four, parts = form(given.arguments)
        if not _taken(four, wide):
            return function(*args, **kwargs)
        y, z = rotate_heads(*(t[0] if t.dim() == 4 else t for t in four), wide, parts)
        return (y.view(four[0].shape), z.view(four[1].shape)) if z.numel() else y.view(four[0].shape)

    return rotated


def _halves(given: Mapping[str, Any]) -> tuple[Four, int]:
    cos, sin = (given[n].unsqueeze(given.get(AXIS, -2)) for n in ("cos", "sin"))
    return (given["q"], given["k"], cos, sin), 1


def _axes(given: Mapping[str, Any]) -> tuple[Four, int]:
    cos, sin = (given[n].unsqueeze(given.get(AXIS, -2)) for n in ("cos", "sin"))
    return (given["x"], given["x"][..., :0, :], cos, sin), given["position_ids"].shape[-1]


# How functions with these first parameters give q, k (none of k where there is one tensor), cos, sin, and the number of parts.
FORMS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], tuple[Four, int]]] = {
    ("q", "k", "cos", "sin"): _halves,
    ("x", "cos", "sin", "position_ids"): _axes,
}


def _taken(four: Four, wide: bool) -> bool:
    """Whether `rotate_heads` takes q, k, cos and sin, of one batch."""
    q, k, cos, sin = four
    heads = (*q.shape[:-2], q.shape[-1]) == (*k.shape[:-2], k.shape[-1]) and k.shape[-2] <= q.shape[-2]
    one = all(t.dim() in (2, 3) or (t.dim() == 4 and t.shape[0] == 1) for t in four)
    sizes = q.dim() in (3, 4) and cos.shape == sin.shape and cos.shape[-1] == q.shape[-1] and q.shape[-1] % 2 == 0
    return heads and one and sizes and len({t.dtype for t in (four[:2] if wide else four)}) == 1


def _same(function: Rotation, form: Callable[[Mapping[str, Any]], tuple[Four, int]], wide: bool, axis: bool) -> bool:
    """Whether the function has the bits of the definition for random bf16 values."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 5, 3, 8, generator=g).bfloat16() for _ in range(2))
    cos, sin = (torch.randn(1, 5, 8, generator=g).bfloat16() for _ in range(2))
    tables = {"cos": cos, "sin": sin}
    given: dict[str, Any] = {"q": q[0], "k": k[0], "cos": cos[0], "sin": sin[0]}
    if form is _axes:
        given = {"x": q, **tables, "position_ids": torch.zeros(1, 5, 2)}
    if axis:
        given[AXIS] = 2 if form is _axes else 1
    try:
        made = function(**given)
    except (RuntimeError, TypeError, ValueError, IndexError):  # a function of other tensors; the tower keeps it
        return False
    four, parts = form(given)
    wanted = [definition(x, *four[2:], wide, parts) for x in four[:2] if x.numel()]
    each = list(made) if isinstance(made, tuple) else [made]
    return len(each) == len(wanted) and all(
        isinstance(a, torch.Tensor) and torch.equal(a, b) for a, b in zip(each, wanted, strict=True)
    )
