"""attend_rows: attention over a paged cache where several rows belong to one sequence: its newest token and its drafts.

Maths   softmax(scale * rope(q) . rope(K)^T) V over slots first .. the row's own, online in base 2
Grid    place   (rows, heads in blocks), of `prompt`: all keys and values are written before any row reads them
        attend  (sequences * HKV, SPLITS, rows in blocks): the queries of some rows of a sequence and a key head are the rows of
                one tl.dot, so these read a slot once; each program takes an equal chunk of the slots
        merge   (rows * HKV, dims in blocks): the programs' parts added up
Limits  as `attend`; a chunked attention, and rows whose sequences are not told, are steps that write nothing, row by row; over
        a cache in few bits it is a prompt's attention, a row a tile
Source  own; split-KV as in Flash-Decoding (Dao et al. 2023)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from dataclasses import replace

import torch
import triton
import triton.language as tl

from lowq_kernels.decode import attend as steps
from lowq_kernels.decode import prompt
from lowq_kernels.decode.attend_triton import LOG2E, _in_pages, capped, cut, score_factor
from lowq_kernels.decode.kv import PLAIN, Cache, kind_of
from lowq_kernels.decode.kv_triton import padded
from lowq_kernels.decode.reference import Groups, Heads, Packed, Places
from lowq_kernels.dispatch.registry import find
from lowq_kernels.lasting import lasting

LEAST = 128  # min. slots per program
QUERIES = 16  # max. queries per program where rows are of several sequences: most of these have a row or two
BLOCK_N = 64  # slots per tile; half for heads of more than 128 dims, a quarter for more than 256


@triton.jit
def _attend_rows_kernel(
    q_ptr, k_ptr, v_ptr, pos_ptr, table_ptr, first_ptr, count_ptr, sinks_ptr, part_ptr, sums_ptr,
    WIDTH, scale, window, cap,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    i, h, split, place = tl.program_id(0) // HKV, tl.program_id(0) % HKV, tl.program_id(1), tl.program_id(2) * BLOCK_Q
    first, T = tl.load(first_ptr + i).to(tl.int32), tl.load(count_ptr + i).to(tl.int32)
    if place >= T * G:
        return
    offs_q, offs_d = place + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    t, g = offs_q // G, offs_q % G
    mask_qd = (t < T)[:, None] & (offs_d < D)[None, :]
    pos = tl.load(pos_ptr + first)
    own, n, low = pos + t, pos + T, tl.maximum(pos + 1 - window, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(n - low, SPLITS), BLOCK_N) * BLOCK_N, LEAST)
    begin = low + split * chunk
    end = tl.minimum(begin + chunk, n)
    row = (first + t).to(tl.int64)
    at = ((row * HKV + h) * SPLITS + split) * G + g
    if begin >= end:  # a sum of nothing, whose part is not read
        tl.store(sums_ptr + at * 2, tl.full((BLOCK_Q,), -1.0e30, tl.float32), mask=t < T)
        tl.store(sums_ptr + at * 2 + 1, tl.zeros((BLOCK_Q,), tl.float32), mask=t < T)
        return
    q = tl.load(q_ptr + ((row * HKV + h) * G + g)[:, None] * D + offs_d[None, :], mask=mask_qd, other=0.0)
    top, total = tl.full((BLOCK_Q,), -1.0e30, tl.float32), tl.zeros((BLOCK_Q,), tl.float32)
    if SINKS:  # one score more, without a value, in the first split
        sink = tl.load(sinks_ptr + h * G + g) * 1.4426950408889634
        top, total = tl.where(split == 0, sink, top), tl.where(split == 0, 1.0, total)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    table = table_ptr + first.to(tl.int64) * WIDTH
    for start in range(begin, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        tile = _in_pages(table, slots, end, h, HKV, PAGE)[:, None] * D + offs_d[None, :]
        there = (slots < end)[:, None] & (offs_d < D)[None, :]
        k = tl.load(k_ptr + tile, mask=there, other=0.0)
        v = tl.load(v_ptr + tile, mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            score = capped(score, cap)
        seen = (slots[None, :] <= own[:, None]) & (slots[None, :] > own[:, None] - window) & (slots < end)[None, :]
        score = tl.where(seen, score, -1.0e30)  # finite: terms of a row that sees no slot are rescaled to 0 later
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    tl.store(part_ptr + at[:, None] * D + offs_d[None, :], acc, mask=mask_qd)
    tl.store(sums_ptr + at * 2, top, mask=t < T)
    tl.store(sums_ptr + at * 2 + 1, total, mask=t < T)


@triton.jit
def _merge_kernel(
    part_ptr, sums_ptr, y_ptr,
    G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    g, offs_s, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, SPLITS), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (head * SPLITS + offs_s[:, None]) * G + g[None, :]
    there = (g < G)[None, :] & (offs_s < SPLITS)[:, None]
    tops = tl.load(sums_ptr + at * 2, mask=there, other=-1.0e30)
    totals = tl.load(sums_ptr + at * 2 + 1, mask=there, other=0.0)
    share = tl.exp2(tops - tl.max(tops, 0)[None, :])
    mask = (there & (totals > 0.0))[:, :, None] & (offs_d < D)[None, None, :]
    parts = tl.load(part_ptr + at[:, :, None] * D + offs_d[None, None, :], mask=mask, other=0.0)
    y = tl.sum(parts * share[:, :, None], 0) / tl.sum(totals * share, 0)[:, None]
    rows = y_ptr + (head * G + g)[:, None] * D + offs_d[None, :]
    tl.store(rows, y.to(y_ptr.dtype.element_ty), mask=(g < G)[:, None] & (offs_d < D)[None, :])


@lasting
def _numbers(M: int, device: torch.device) -> torch.Tensor:
    """0 .. M - 1. Never freed: CUDA graphs hold its address."""
    return torch.arange(M, dtype=torch.int32, device=device)


def attend_rows(
    qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads, groups: Groups | None = None
) -> torch.Tensor:
    """As `reference.attend_rows`."""
    (pos, cos, sin, table, _), M = at, qkv.shape[0]
    assert table is not None
    rows = _numbers(M, qkv.device)
    if kind_of(k_cache) != PLAIN:
        packed = Packed(table, rows, pos, torch.stack((rows, rows + 1), 1))
        return prompt.attend_packed(qkv, k_cache, v_cache, packed, cos, sin, h)
    if not h.writes:
        return steps.attend(qkv, k_cache, v_cache, at, h)
    if groups is not None and groups[0].shape[0] == 1 and qkv.is_cuda:
        width, slots = table.shape[1], k_cache.shape[2]
        call = steps.RowsCall.of(qkv, width * slots, cos.shape[1], h, slots if width > 1 else 0)
        if (choice := find(call)) is not None:
            return choice[0].launch(qkv, k_cache, v_cache, at, h, groups, choice[1])
    q = torch.empty(M, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    norms = (h.q_norm, h.q_norm if h.k_norm is None else h.k_norm)
    prompt._place_kernel[(M, triton.cdiv(h.HQ + 2 * h.HKV, prompt.HEADS_AT_ONCE))](
        qkv, k_cache, v_cache, rows, pos, table, cos, sin, *norms, q, 1 << 30, 0, k_cache.shape[2], table.shape[1], h.eps,
        HQ=h.HQ, HKV=h.HKV, D=h.D, R=cos.shape[1], NORM=h.q_norm is not None, PAGE=k_cache.shape[2],
        BLOCK_H=prompt.HEADS_AT_ONCE, BLOCK_D=padded(h.D), num_warps=4,
    )  # fmt: skip
    if groups is None or h.chunk:
        plain = replace(h, q_norm=None, k_norm=None, writes=False)
        return steps.attend(q, k_cache, v_cache, at._replace(cos=cos[:, :0], sin=sin[:, :0]), plain)
    return _attend(q, k_cache, v_cache, pos, h, table, groups)


def _attend(
    q: torch.Tensor, k_cache: Cache, v_cache: Cache, pos: torch.Tensor, h: Heads, table: torch.Tensor, groups: Groups
) -> torch.Tensor:
    """Attention of queries q (M, HQ * D) over a cache that holds all keys and values."""
    first, count, most = groups
    M, n, G, BLOCK_D = q.shape[0], first.shape[0], h.HQ // h.HKV, padded(h.D)
    splits = cut(n * h.HKV, table.shape[1] > 1)["SPLITS"]
    part = torch.empty(M * h.HQ * splits * h.D, dtype=torch.float32, device=q.device)
    sums = torch.empty(M * h.HQ * splits * 2, dtype=torch.float32, device=q.device)
    BLOCK_Q, tile = max(16, triton.next_power_of_2(most * G)), BLOCK_N * 128 // max(128, BLOCK_D)
    BLOCK_Q = BLOCK_Q if n == 1 else min(QUERIES, BLOCK_Q)
    _attend_rows_kernel[(n * h.HKV, splits, triton.cdiv(min(M, most) * G, BLOCK_Q))](
        q, k_cache, v_cache, pos, table, first, count, h.sinks, part, sums,
        table.shape[1], score_factor(h), h.window or 1 << 30, h.softcap * LOG2E,
        HKV=h.HKV, G=G, D=h.D, SPLITS=splits, LEAST=LEAST, BLOCK_Q=BLOCK_Q, BLOCK_D=BLOCK_D,
        BLOCK_N=min(tile, k_cache.shape[2]), PAGE=k_cache.shape[2], SINKS=h.sinks is not None, CAPPED=h.softcap != 0.0,
        num_warps=4 if BLOCK_Q * BLOCK_D <= 4096 else 8, num_stages=2,
    )  # fmt: skip
    y = torch.empty_like(q)
    dims = min(BLOCK_D, 64)
    _merge_kernel[(M * h.HKV, triton.cdiv(h.D, dims))](
        part, sums, y, G=G, D=h.D, SPLITS=splits, BLOCK_G=triton.next_power_of_2(G), BLOCK_D=dims, num_warps=4
    )
    return y
