"""add_norm, gated, activated and attend in C++ (products/cpu/step.h): torch allocates a dozen small tensors for each.

In torch they took 8 of the 45 ms per token of a 1B model in 4 bits. Calls that step.h does not take (odd heads, other strides,
no compiler) run in `reference`, which defines each operation.
"""

from typing import Any

import torch

from lowq_kernels.decode import activation, reference
from lowq_kernels.decode.kv import Cache
from lowq_kernels.decode.kv_cpu import KINDS, LANES, by_heads, in_cpp, slots_of
from lowq_kernels.decode.reference import Heads, Packed, Places
from lowq_kernels.products.cpu import native
from lowq_kernels.products.cpu.native import ADD_NORM, ATTEND, DTYPES, GATED, struct

ACTS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", activation.CLAMPED)  # as args.h numbers them

ARGS = (
    struct("Norm", p="x delta post weight y", i="M H dtype meta threads", f="eps"),
    struct("Gated", p="x by y", q="apart", i="M I dtype act alone threads", f="scale"),
    struct(
        "Attend",
        p="qkv k v k_scales v_scales cos sin pos table q_norm k_norm sinks y",
        q="block head",
        i="B HQ HKV D R BLOCK wide window kv dtype meta threads",
        f="scale eps",
    ),
)


def _run(what: int, dtype: torch.dtype, tensors: dict[str, torch.Tensor | None], **numbers: float) -> None:
    native.run(what, ARGS[what], dtype, tensors, **numbers)


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, post: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.add_norm`."""
    odd = (delta is not None and delta.dtype != x.dtype) or (post is not None and post.dtype != weight.dtype)
    if odd or not native.takes(x, delta, weight, post):
        return reference.add_norm(x, delta, weight, eps, post)
    y = torch.empty_like(x)
    tensors = {"x": x, "delta": delta, "post": post, "weight": weight, "y": y}
    _run(ADD_NORM, x.dtype, tensors, M=x.shape[0], H=x.shape[1], meta=DTYPES[weight.dtype], eps=eps)
    return y


def gated(gate_up: torch.Tensor, act: str, gate_scale: float = 1.0) -> torch.Tensor:
    """As `activation.gated`."""
    if act not in ACTS or not native.takes(gate_up):
        return activation.gated(gate_up, act, gate_scale)
    M, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(M, inner, dtype=gate_up.dtype)
    _run(GATED, y.dtype, {"x": gate_up, "y": y}, M=M, I=inner, act=ACTS.index(act), scale=gate_scale)
    return y


def activated(x: torch.Tensor, act: str, by: torch.Tensor | None = None) -> torch.Tensor:
    """As `activation.activated`."""
    rows = by is None or (by.dtype == x.dtype and by.shape == x.shape and by.stride(1) == 1 and not by.requires_grad)
    if act not in activation.ACTIVATIONS or x.dim() != 2 or not rows or not native.takes(x):
        return activation.activated(x, act, by)
    y, (M, inner), apart = torch.empty_like(x), x.shape, 0 if by is None else by.stride(0)
    tensors = {"x": x, "by": by, "y": y}
    _run(GATED, y.dtype, tensors, M=M, I=inner, act=ACTS.index(act), alone=True, apart=apart, scale=1.0)
    return y


def attend(qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads) -> torch.Tensor:
    """As `reference.attend`."""
    (pos, cos, sin, table, _), norms, dtype = at, (h.q_norm, h.k_norm), qkv.dtype
    k, v = slots_of(k_cache), slots_of(v_cache)
    alike = k is not None and v is not None and k[2:] == v[2:] and k.kv in (DTYPES.get(dtype), *KINDS.values())
    alike = alike and cos.dtype == sin.dtype == dtype and k_cache.shape[3] == h.D
    placed = pos.dtype == torch.int32 and pos.is_contiguous()
    paged = table is None or (table.dtype == torch.int32 and table.stride(1) == 1)
    one = (norms[0] is None) == (norms[1] is None) and (norms[0] is None or norms[0].dtype == norms[1].dtype)  # type: ignore[union-attr]
    whole = h.D % LANES == 0 and cos.shape[1] <= h.D
    taken = alike and placed and paged and one and whole and not h.beyond and native.takes(qkv, cos, sin, *norms)
    if not taken or k is None or v is None:
        return reference.attend(qkv, in_cpp(k_cache), in_cpp(v_cache), at, h)
    B = qkv.shape[0]
    y = torch.empty(B, h.HQ * h.D, dtype=dtype)
    tensors = {"qkv": qkv, "k": k.values, "v": v.values, "cos": cos, "sin": sin, "pos": pos, "table": table}
    tensors |= {"k_scales": k.scales, "v_scales": v.scales, "q_norm": h.q_norm, "k_norm": h.k_norm, "sinks": h.sinks, "y": y}
    sizes = {"B": B, "HQ": h.HQ, "HKV": h.HKV, "D": h.D, "R": cos.shape[1], "BLOCK": k_cache.shape[2], "window": h.window}
    sizes |= {"block": k.block, "head": k.head, "kv": k.kv, "wide": 0 if table is None else table.stride(0)}
    meta = DTYPES[dtype if h.q_norm is None else h.q_norm.dtype]
    _run(ATTEND, dtype, tensors, **sizes, meta=meta, scale=h.scale, eps=h.eps)
    return y


def attend_prompt(
    qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, start: int, cos: torch.Tensor, sin: torch.Tensor, h: Heads
) -> torch.Tensor:
    """As `reference.attend_prompt`."""
    n = qkv.shape[0] * (start + qkv.shape[1])
    return by_heads(reference.attend_prompt, qkv, (k_cache, v_cache), (start, cos, sin), n, h)


def attend_packed(
    qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, p: Packed, cos: torch.Tensor, sin: torch.Tensor, h: Heads
) -> torch.Tensor:
    """As `reference.attend_packed`."""
    return by_heads(reference.attend_packed, qkv, (k_cache, v_cache), (p, cos, sin), int(p.pos.max()) + 1, h)


def attend_rows(*operands: Any, groups: object = None) -> torch.Tensor:
    """As `reference.attend_rows`: step.h writes all keys and values before it reads any."""
    return attend(*operands)
