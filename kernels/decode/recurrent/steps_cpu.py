"""Steps of gated delta, Mamba2 and short convolutions in C++ (products/cpu/recurrent.h), as forms of the definitions.

In torch a step of one sequence is about 40 small operations and six passes over its state: 405 us for gated delta of 32 heads
of 128 x 128. What recurrent.h does not take (other norms or strides, no compiler) runs in the definitions.
"""

from dataclasses import replace
from typing import Any

import torch

from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.recurrent import States, delta, mamba2, short_conv
from lowq_kernels.decode.recurrent.delta import Delta
from lowq_kernels.decode.recurrent.mamba2 import Mamba2
from lowq_kernels.decode.recurrent.short_conv import ShortConv
from lowq_kernels.dispatch.registry import register
from lowq_kernels.products.cpu import native
from lowq_kernels.products.cpu.native import DTYPES, struct

CONV = struct("Conv", p="weight bias state", i="C W meta kind")
FIRST = ("conv", CONV)
ARGS: dict[int, Any] = {
    native.DELTA: struct(
        "Delta",
        FIRST,
        p="x slots S a_log dt_bias norm y",
        i="B k_heads v_heads k_dim v_dim grouped log_kind bias_kind norm_kind dtype threads",
        f="eps norm_eps",
    ),
    native.MAMBA2: struct(
        "Mamba2",
        FIRST,
        p="x slots S a_log dt_bias d norm y",
        i="B heads dim groups N norm_groups gate_last log_kind bias_kind d_kind norm_kind dtype threads",
        f="norm_eps least most z_scale x_scale B_scale C_scale dt_scale",
    ),
    native.SHORT_CONV: struct("ShortConv", FIRST, p="x slots y", i="B dtype threads"),
}


def delta_step(x: torch.Tensor, f: Delta, states: States, slots: torch.Tensor) -> torch.Tensor:
    """As `delta.step`."""
    weights = (f.a_log, f.dt_bias, f.norm.weight)
    if not (_normed(f.norm) and f.norm.groups == 1 and _taken(x, f, states, slots, *weights)):
        return delta.step(x, f, states, slots)
    sizes = {n: getattr(f, n) for n in ("k_heads", "v_heads", "k_dim", "v_dim", "grouped")}
    tensors = {"S": states["S"], "a_log": f.a_log, "dt_bias": f.dt_bias, "norm": f.norm.weight}
    kinds = _kinds(log_kind=f.a_log, bias_kind=f.dt_bias, norm_kind=f.norm.weight)
    width = f.v_heads * f.v_dim
    return _run(native.DELTA, x, f, states, slots, width, tensors, **sizes, **kinds, eps=delta.EPS, norm_eps=f.norm.eps)


def mamba2_step(x: torch.Tensor, f: Mamba2, states: States, slots: torch.Tensor) -> torch.Tensor:
    """As `mamba2.step`."""
    weight = None if f.norm is None else f.norm.weight
    if not ((f.norm is None or _normed(f.norm)) and _taken(x, f, states, slots, f.a_log, f.dt_bias, f.d, weight)):
        return mamba2.step(x, f, states, slots)
    sizes = {n: getattr(f, n) for n in ("heads", "dim", "groups", "N", "gate_last")}
    tensors = {"S": states["S"], "a_log": f.a_log, "dt_bias": f.dt_bias, "d": f.d, "norm": weight}
    kinds = _kinds(log_kind=f.a_log, bias_kind=f.dt_bias, d_kind=f.d, norm_kind=weight)
    numbers = {"least": f.dt[0], "most": f.dt[1], "norm_groups": 1, "norm_eps": 0.0}
    numbers |= {} if f.norm is None else {"norm_groups": f.norm.groups, "norm_eps": f.norm.eps}
    numbers |= dict(zip(("z_scale", "x_scale", "B_scale", "C_scale", "dt_scale"), f.scales, strict=True))
    return _run(native.MAMBA2, x, f, states, slots, f.heads * f.dim, tensors, **sizes, **kinds, **numbers)


def short_conv_step(x: torch.Tensor, f: ShortConv, states: States, slots: torch.Tensor) -> torch.Tensor:
    """As `short_conv.step`."""
    if not _taken(x, f, states, slots):
        return short_conv.step(x, f, states, slots)
    return _run(native.SHORT_CONV, x, f, states, slots, f.weight.shape[0], {})


def refuse(call: delta.DeltaCall | mamba2.Mamba2Call | short_conv.ShortConvCall) -> str | None:
    """Why these kernels do not take a call, or None."""
    if call.run:
        return "takes one token of each sequence, not runs"
    return native.refuse(call)


for _definition, _step in ((delta, delta_step), (mamba2, mamba2_step), (short_conv, short_conv_step)):
    _op = _definition.__name__.rsplit(".", 1)[1]
    register(f"cpu/{_op}", op=_op, devices=("cpu",), dtypes=tuple(DTYPES), rank=50, refuse=refuse)(
        replace(_definition.DEFINITION, step=_step).either
    )


def _normed(norm: Norm) -> bool:
    return norm.kind == "rms" and norm.bias is None and norm.weight is not None


def _kinds(**weights: torch.Tensor | None) -> dict[str, int]:
    return {name: 0 if t is None else DTYPES[t.dtype] for name, t in weights.items()}


def _taken(
    x: torch.Tensor, f: Delta | Mamba2 | ShortConv, states: States, slots: torch.Tensor, *weights: torch.Tensor | None
) -> bool:
    """Whether the library is built and takes these tensors: contiguous, in its dtypes, the state S in fp32."""
    alike = f.bias is None or f.bias.dtype == f.weight.dtype
    exact = "S" not in states or states["S"].dtype == torch.float32
    placed = slots.is_contiguous() and slots.dtype == torch.int64
    return alike and exact and placed and native.takes(x, f.weight, f.bias, *states.values(), *weights)


def _run(
    what: int,
    x: torch.Tensor,
    f: Delta | Mamba2 | ShortConv,
    states: States,
    slots: torch.Tensor,
    width: int,
    tensors: dict[str, torch.Tensor | None],
    **numbers: float,
) -> torch.Tensor:
    y, state, (C, W) = torch.empty(x.shape[0], width, dtype=x.dtype), states["conv"], f.weight.shape
    pointers = {"weight": f.weight.data_ptr(), "bias": None if f.bias is None else f.bias.data_ptr(), "state": state.data_ptr()}
    conv = CONV(**pointers, C=C, W=W, meta=DTYPES[f.weight.dtype], kind=DTYPES[state.dtype])
    native.run(what, ARGS[what], x.dtype, {"x": x, "slots": slots, "y": y, **tensors}, conv=conv, B=x.shape[0], **numbers)
    return y
