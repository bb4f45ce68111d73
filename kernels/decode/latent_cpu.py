"""A step of latent attention in C++ (products/cpu/latent.h); prompts and odd widths are the definition's."""

from typing import Any

import torch

from lowq_kernels.decode import latent as definition
from lowq_kernels.decode.kv import Cache
from lowq_kernels.decode.kv_cpu import KINDS, LANES, Slots, in_cpp, slots_of
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.reference import Places
from lowq_kernels.decode.rows_cpu import NORM, norm_fields, norms_fit
from lowq_kernels.products.cpu import native
from lowq_kernels.products.cpu.native import DTYPES, struct

LATENT = struct(
    "Latent",
    ("norm", NORM),
    p="q latent cache scales cos sin pos table k_up v_up y",
    q="block k_apart v_apart",
    i="B heads nope rotated v_dim rank BLOCK wide neighbours angle_kind up_kind offset kv dtype threads",
    f="scale beta period",
)


def step(q: torch.Tensor, latent: torch.Tensor, cache: Cache, at: Places, f: Latent) -> torch.Tensor:
    """As `latent.step`; keys of all rows are written before any is read, so rows may be of one text."""
    held = slots_of(cache)
    if held is None or not _takes(q, latent, held, cache.shape[3], at, f):
        return definition.step(q, latent, in_cpp(cache), at, f)
    (pos, cos, sin, table, _), B, dtype = at, q.shape[0], q.dtype
    y = torch.empty(B, f.heads * f.v_dim, dtype=dtype)
    tensors = {
        "q": q,
        "latent": latent,
        "cache": held.values,
        "scales": held.scales,
        "cos": cos,
        "sin": sin,
        "pos": pos,
        "table": table,
    }
    numbers = {name: getattr(f, name) for name in ("heads", "nope", "rotated", "v_dim", "rank", "scale")}
    strides = {"block": held.block, "k_apart": f.k_up.stride(0), "v_apart": f.v_up.stride(0)}
    strides |= {"wide": 0 if table is None else table.stride(0), "BLOCK": cache.shape[2]}
    kinds = {
        "angle_kind": DTYPES[cos.dtype],
        "up_kind": DTYPES[f.k_up.dtype],
        "kv": held.kv,
        "neighbours": f.pairing == "neighbours",
    }
    scale = f.position_scale
    numbers |= {} if scale is None else {"beta": scale.beta, "period": scale.period, "offset": scale.offset}
    tensors |= {"k_up": f.k_up, "v_up": f.v_up, "y": y}
    native.run(native.LATENT, LATENT, dtype, tensors, B=B, norm=norm_fields(f.norm), **numbers, **strides, **kinds)
    return y


def _takes(q: torch.Tensor, latent: torch.Tensor, held: Slots, wide: int, at: Places, f: Latent) -> bool:
    (pos, cos, sin, table, _), D, ups = at, f.rank + f.rotated, (f.k_up, f.v_up)
    if D % LANES or wide != D or cos.shape[1] != f.rotated or not norms_fit(f.norm, f.rank):
        return False
    alike = q.dtype == latent.dtype and held.kv in (DTYPES.get(q.dtype), *KINDS.values()) and cos.dtype == sin.dtype
    kinds = all(t.dtype == f.k_up.dtype and t.dtype in (q.dtype, torch.float32) and t.stride()[1:] == (f.rank, 1) for t in ups)
    placed = pos.dtype == torch.int32 and pos.is_contiguous()
    paged = table is None or (table.dtype == torch.int32 and table.stride(1) == 1)
    learns = any(t.requires_grad for t in ups) and torch.is_grad_enabled()
    return alike and kinds and placed and paged and not learns and native.takes(q, latent, cos, sin)


def prompt(q: torch.Tensor, latent: torch.Tensor, cache: Cache, *rest: Any) -> torch.Tensor:
    """As `latent.prompt`."""
    return definition.prompt(q, latent, in_cpp(cache), *rest)


def packed(q: torch.Tensor, latent: torch.Tensor, cache: Cache, *rest: Any) -> torch.Tensor:
    """As `latent.packed`."""
    return definition.packed(q, latent, in_cpp(cache), *rest)
