"""`prepare`, `attend` and, for heads with gates, `opened` in one kernel, where cuda/attend takes them: steps of wide heads."""

from dataclasses import replace

import torch

from lowq_kernels.decode import attend_cuda
from lowq_kernels.decode.attend import AttendCall, RowsCall
from lowq_kernels.decode.kv import Cache, kind_of
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import Prepared
from lowq_kernels.decode.reference import Groups, Heads, Places
from lowq_kernels.dispatch.registry import find, select


def _plain(norm: Norm | None, D: int) -> bool:
    """Whether a norm is an RMSNorm over a head, with weights that all heads share."""
    return norm is not None and norm.is_rms and norm.weight is not None and norm.weight.numel() == D


def fused(p: Prepared, h: Heads) -> tuple[Heads, int] | None:
    """The heads with the norms of `p`, and attend.cu's number of the layout; None where the kernel computes less than `p`."""
    facts = p.order, p.over, p.norm_last, p.pairing, p.key_scale, p.position_scale
    if facts != ("parts", "head", False, "halves", 1.0, None):
        return None
    own = (p.q_norm, p.k_norm) if p.writes else (p.q_norm,)
    if not all(n is None for n in own) and not all(_plain(n, p.D) for n in own):
        return None
    v_norm = p.v_norm if p.writes else None
    norms = [n for n in (*own, v_norm) if n is not None]
    if (v_norm is not None and (not v_norm.is_rms or v_norm.weight is not None)) or len({n.eps for n in norms}) > 1:
        return None
    if len({n.weight.dtype for n in own if n is not None and n.weight is not None}) > 1:
        return None
    weights = [None if n is None else n.weight for n in own]
    eps = norms[0].eps if norms else 0.0
    layout = (
        attend_cuda.GATED * p.gated + attend_cuda.V_NORMED * (v_norm is not None) + attend_cuda.V_IS_K * (p.v_is_k and p.writes)
    )
    return replace(h, q_norm=weights[0], k_norm=weights[-1], eps=eps), layout


def attend(
    qkv: torch.Tensor, p: Prepared, k_cache: Cache, v_cache: Cache, at: Places, h: Heads, groups: Groups | None = None
) -> torch.Tensor | None:
    """As `prepare` of rows qkv, then `reference.attend` (with groups `attend_rows`), then `opened` by the gate if there is one;
    None where no kernel takes all of it."""
    if (made := fused(p, h)) is None:
        return None
    (heads, layout), table = made, at.table
    S, block = k_cache.shape[2], 0
    if table is not None:
        S, block = table.shape[1] * S, S
    if groups is not None:
        facts = qkv, S, at.cos.shape[1], heads, block if table is not None and table.shape[1] > 1 else 0, kind_of(k_cache)
        of_one = groups[0].shape[0] == 1 and table is not None and h.D > 128
        if not of_one or find(replace(RowsCall.of(*facts), layout=layout)) is None:
            return None
        return attend_cuda.attend_rows(qkv, k_cache, v_cache, at, heads, groups, layout=layout)
    call = replace(AttendCall.of(qkv, S, at.cos.shape[1], heads, block, kind_of(k_cache)), layout=layout)
    if h.D <= 128 or select(call)[0].name != "cuda/attend":
        return None
    return attend_cuda.attend(qkv, k_cache, v_cache, at, heads, layout=layout)
