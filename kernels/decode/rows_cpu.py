"""update_norm, add, normed, prepare and gates of outputs in C++ (products/cpu/rows.h), for layers that differ from Llama's.

In torch each is 5 to 25 small operations, which also keep a step from being replayed as one call (`Repeated`). What rows.h does
not take (other strides, no compiler) runs in the definitions.
"""

import ctypes
from functools import partial
from typing import Any, TypeVar

import torch

from lowq_kernels.decode import activation, norms
from lowq_kernels.decode import prepare as definition
from lowq_kernels.decode.norms import ALONE, Addition, Norm
from lowq_kernels.decode.prepare import Prepared
from lowq_kernels.products.cpu import dense, native
from lowq_kernels.products.cpu.native import DTYPES, struct

Delta = TypeVar("Delta", torch.Tensor, torch.Tensor | None)
NORM = struct("AnyNorm", p="weight bias", i="layer weight_kind bias_kind groups", f="eps")
ARGS: dict[int, Any] = {
    native.UPDATE: struct(
        "Update", ("norm", NORM), ("post", NORM), p="x delta second after y", i="M H posts after_kind dtype threads", f="scale"
    ),
    native.OPEN: struct("Open", p="x gate y", i="M N wide dtype threads"),
    native.PREPARE: struct(
        "Prepare",
        ("q_norm", NORM),
        ("k_norm", NORM),
        ("v_norm", NORM),
        p="x cos sin pos y gate",
        i="B HQ HKV D R values by_head gated v_is_k writes all norm_last neighbours "
        "q_normed k_normed v_normed angle_kind offset dtype threads",
        f="key_scale beta period",
    ),
}


def update_norm(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, how: Addition = ALONE) -> torch.Tensor:
    """As `norms.update_norm`."""
    delta, how = _without_own(delta, how)
    if not _updates(x, delta, norm, how):
        return norms.update_norm(x, delta, norm, how)
    y = torch.empty_like(x)
    _update(x, delta, norm, how, y)
    return y


def add(x: torch.Tensor, delta: torch.Tensor, how: Addition = ALONE) -> None:
    """As `norms.add`."""
    delta, how = _without_own(delta, how)
    if _updates(x, delta, None, how):
        _update(x, delta, None, how, None)
    else:
        norms.add(x, delta, how)


def _without_own(delta: Delta, how: Addition) -> tuple[Delta, Addition]:
    """An addition whose operands have norms, as one without: delta and second normed, and rounded, unlike in the definition."""
    if how.own is None:
        return delta, how
    assert delta is not None
    assert how.second is not None
    return normed(delta, how.own[0]), how._replace(second=normed(how.second, how.own[1]), own=None)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """As `norms.normed`."""
    if x.dim() != 2 or not _updates(x, None, norm, ALONE):
        return norms.normed(x, norm)
    y = torch.empty_like(x)
    _update(x, None, norm, ALONE, y)
    return y


update_norms = partial(norms.update_norms, update_norm=update_norm, normed=normed)


def opened(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `activation.opened`."""
    wide = gate.shape[1] in (1, y.shape[1]) and gate.dtype == y.dtype
    if y.dim() != 2 or not wide or not native.takes(y, gate):
        return activation.opened(y, gate)
    z, (M, N) = torch.empty_like(y), y.shape
    native.run(native.OPEN, ARGS[native.OPEN], y.dtype, {"x": y, "gate": gate, "y": z}, M=M, N=N, wide=gate.shape[1])
    return z


def opened_by(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As `activation.opened_by`."""
    return opened(y, dense.product(x, weight, None))


def prepare(
    qkv: torch.Tensor, p: Prepared, pos: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `prepare.prepare`."""
    fits = (
        norms_fit(p.q_norm, p.HQ * p.D if p.over == "all" else p.D)
        and norms_fit(p.k_norm, p.HKV * p.D if p.over == "all" else p.D)
        and norms_fit(p.v_norm, p.D)
    )
    tables = (cos is None) == (sin is None) and (cos is None or sin is None or (cos.dtype == sin.dtype and cos.shape[1] <= p.D))
    if not (fits and tables and pos.dtype == torch.int32 and pos.is_contiguous() and native.takes(qkv, cos, sin)):
        return definition.prepare(qkv, p, pos, cos, sin)
    B, width = qkv.shape[0], p.HQ + 2 * p.HKV * p.writes
    y = torch.empty(B, width * p.D, dtype=qkv.dtype)
    gate = torch.empty(B, p.HQ * p.D, dtype=qkv.dtype) if p.gated else None
    scale = p.position_scale
    numbers: dict[str, Any] = {"B": B, "HQ": p.HQ, "HKV": p.HKV, "D": p.D, "R": 0 if cos is None else cos.shape[1]}
    numbers |= {"values": p.HKV * p.D * (1 if p.v_is_k else 2), "by_head": p.order == "heads", "all": p.over == "all"}
    numbers |= {n: getattr(p, n) for n in ("gated", "v_is_k", "writes", "norm_last", "key_scale")}
    numbers |= {"neighbours": p.pairing == "neighbours", "angle_kind": 0 if cos is None else DTYPES[cos.dtype]}
    numbers |= {} if scale is None else {"beta": scale.beta, "period": scale.period, "offset": scale.offset}
    for name, norm in (("q", p.q_norm), ("k", p.k_norm), ("v", p.v_norm)):
        numbers |= {f"{name}_norm": norm_fields(norm), f"{name}_normed": norm is not None}
    tensors = {"x": qkv, "cos": cos, "sin": sin, "pos": pos, "y": y, "gate": gate}
    native.run(native.PREPARE, ARGS[native.PREPARE], qkv.dtype, tensors, **numbers)
    return y, gate


def _update(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None, how: Addition, y: torch.Tensor | None) -> None:
    tensors = {"x": x, "delta": delta, "second": how.second, "after": how.after, "y": y}
    sizes = {"M": x.shape[0], "H": x.shape[1], "posts": how.post is not None, "scale": how.scale}
    kind = 0 if how.after is None else DTYPES[how.after.dtype]
    both = {"norm": norm_fields(norm), "post": norm_fields(how.post)}
    native.run(native.UPDATE, ARGS[native.UPDATE], x.dtype, tensors, after_kind=kind, **both, **sizes)


def norm_fields(norm: Norm | None) -> ctypes.Structure:
    if norm is None:
        return NORM(groups=1)
    weights: dict[str, Any] = {}
    for name, t in (("weight", norm.weight), ("bias", norm.bias)):
        weights |= {} if t is None else {name: t.data_ptr(), f"{name}_kind": DTYPES[t.dtype]}
    return NORM(layer=norm.kind == "layer", groups=norm.groups, eps=norm.eps, **weights)


def _updates(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None, how: Addition) -> bool:
    after, second = how.after, how.second
    alike = all(t is None or (t.dtype == x.dtype and t.shape == x.shape) for t in (delta, second))
    if not alike or x.dim() != 2 or (after is not None and after.numel() != 1):
        return False
    return norms_fit(norm, x.shape[1]) and norms_fit(how.post, x.shape[1]) and native.takes(x, delta, second, after)


def norms_fit(norm: Norm | None, n: int) -> bool:
    """Whether a norm's weights are one for each of n values."""
    if norm is None:
        return True
    sized = all(t is None or t.numel() == n for t in (norm.weight, norm.bias))
    return sized and n % norm.groups == 0 and native.takes(norm.weight, norm.bias)
