"""triton/latent: one token of each sequence over its cache of latents, absorbed, in three kernels.

    absorb  (heads, rank in blocks, rows in up to 64s): queries in the dims of the latents, k_up^T q, and turned; a program a
            sequence more writes the new token's normed latent and turned key into the cache
    attend  (sequences x heads in 16s or 64s, splits): softmax over a chunk of slots; the queries of all heads share one key
    values  (heads, v_dim in blocks, sequences): the splits' parts are added up in their order, and brought to values, v_up y;
            where the splits are few, (heads, v_dim in blocks, sequences in up to 64s), so that sequences share a read of v_up

Maths   softmax(scale * q . [latent, key]) latent, online in base 2; everything that is multiplied is in the cache's dtype
Paged   PAGE slots a block, found by a table; 0: a cache a sequence
Limits  latents of up to 512 values, keys of up to 128, in 16 bits or fp32; not over a cache in few bits
Source  own; absorbed as in DeepSeek-V2 (arXiv:2405.04434), split as in Flash-Decoding (Dao et al. 2023)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv import PLAIN
from lowq_kernels.decode.kv_triton import padded
from lowq_kernels.decode.latent import Latent, LatentCall, by_definition
from lowq_kernels.decode.launch import launch_next, pdl, wait
from lowq_kernels.decode.prepare_triton import normed, pairs, statistics
from lowq_kernels.decode.reference import Places
from lowq_kernels.dispatch.registry import FLOATS, Config, register

ROWS = 16  # min. queries per matrix product: heads of a sequence, or sequences of a head
MOST_ROWS = 64  # max. sequences of a head per matrix product with k_up or v_up
RANK_BLOCK = 64  # latent dims per program of `absorb`
PROGRAMS = 256  # target number of programs: about two per multiprocessor
MOST_SPLITS = 64
VALUES = 64  # values of a head per program of `values`
VALUES_RANK = 128  # latent dims per matrix product with v_up
PARTS = 8  # splits merged at once
# Max. splits for which several sequences are brought to values by one matrix product. With a program for each, deepseek_v3 (128
# heads) took 45 us a layer for 8 sequences and 324 us for 64 on an H200, 30% of its step.
FEW_SPLITS = 4
# Whether a program reads its first tile before the previous kernel has ended (launch.py). Not over a paged cache, where several
# rows, drafts, may be of one sequence and read what each other's `absorb` writes. On an H200 a layer of deepseek_v2 takes 1.4
# us less with it, with eight sequences 2
EARLY = True


class Tiles(NamedTuple):
    """How `attend` is cut: heads and slots per tile, and the target number of programs."""

    heads: int
    slots: int
    programs: int = PROGRAMS


# By the least number of queries, heads of all sequences. H200, one layer of deepseek_v3 (128 heads), us, for the tiles that are
# taken and those before: 2 sequences of 220 tokens 27.9 and 29.1, 8 of 220 29.9 and 32.5, 8 of 4,000 101 and 139; 16 of 1,000
# 53, 65 and 84, 64 of 220 50, 68 and 79, 64 of 3,000 244, 461 and 652; but 32 of 220 49, 45 and 52.
TILES = ((2048, Tiles(64, 64, 128)), (512, Tiles(16, 64)), (0, Tiles(16, 32)))
WIDEST = 576  # max. dims of a latent and its key in tiles of 64 heads: those of 640 need more shared memory than there is


@triton.jit
def _absorb_kernel(
    q_ptr, x_ptr, k_up_ptr, cache_ptr, pos_ptr, table_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, out_ptr,
    B, S, stride_q, stride_x, eps, beta, period, offset,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr, NEIGHBOURS: tl.constexpr,
    SCALED: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_RANK: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    """S: slots of a cache, or the width of the table. Programs from HEADS on: those of sequences."""
    head, block = tl.program_id(0), tl.program_id(1)
    offs_p = tl.arange(0, BLOCK_R)  # turned dims
    partner, first, angle = pairs(offs_p, R, NEIGHBOURS)
    mask_p = offs_p < R
    dtype = out_ptr.dtype.element_ty
    WIDE: tl.constexpr = RANK + R
    launch_next(TRIGGER)
    if head < HEADS:
        rows, offs_n = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_NOPE)
        dims = block * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
        up = k_up_ptr + (head * NOPE + offs_n)[:, None] * RANK + dims[None, :]
        up = tl.load(up, mask=(offs_n < NOPE)[:, None] & (dims < RANK)[None, :], other=0.0)
        there = rows < B
        pos = tl.load(pos_ptr + rows, mask=there, other=0)
        wait(PDL)
        by = tl.full((BLOCK_B,), 1.0, tl.float32)
        if SCALED:
            by = 1.0 + beta * tl.log(1.0 + tl.floor((pos.to(tl.float32) + offset) / period))
        own = q_ptr + (rows.to(tl.int64) * stride_q + head * (NOPE + R))[:, None]
        q = tl.load(own + offs_n[None, :], mask=there[:, None] & (offs_n < NOPE)[None, :], other=0.0)
        y = tl.dot(q, up.to(q.dtype), input_precision="ieee") * by[:, None]
        out = out_ptr + (rows.to(tl.int64) * HEADS + head)[:, None] * WIDE
        tl.store(out + dims[None, :], y.to(dtype), mask=there[:, None] & (dims < RANK)[None, :])
        if block == 0:
            mask = there[:, None] & mask_p[None, :]
            turned = tl.load(own + NOPE + offs_p[None, :], mask=mask, other=0.0).to(tl.float32)
            other = tl.load(own + NOPE + partner[None, :], mask=mask, other=0.0).to(tl.float32)
            at = pos.to(tl.int64)[:, None] * R + angle[None, :]
            cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
            turned = turned * cos + other * tl.where(first[None, :], -sin, sin)
            tl.store(out + RANK + offs_p[None, :], (turned * by[:, None]).to(dtype), mask=mask)
    elif (block == 0) & (tl.program_id(2) == 0):
        b = head - HEADS
        pos = tl.load(pos_ptr + b)
        place = b.to(tl.int64) * S + pos
        if PAGE:
            place = tl.load(table_ptr + b * S + pos // PAGE).to(tl.int64) * PAGE + pos % PAGE
        wait(PDL)
        token, slot = x_ptr + b.to(tl.int64) * stride_x, cache_ptr + place * WIDE
        dims = tl.arange(0, WHOLE)
        x = tl.load(token + dims, mask=dims < RANK, other=0.0).to(tl.float32)
        mean, inverse = statistics(x, dims < RANK, RANK, eps, LAYER)
        x = normed(x, mean, inverse, weight_ptr, bias_ptr, dims, dims < RANK, WEIGHT, BIAS)
        tl.store(slot + dims, x.to(dtype), mask=dims < RANK)
        key = tl.load(token + RANK + offs_p, mask=mask_p, other=0.0).to(tl.float32)
        other = tl.load(token + RANK + partner, mask=mask_p, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + pos.to(tl.int64) * R + angle, mask=mask_p, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + pos.to(tl.int64) * R + angle, mask=mask_p, other=0.0).to(tl.float32)
        tl.store(slot + RANK + offs_p, (key * cos + other * tl.where(first, -sin, sin)).to(dtype), mask=mask_p)


@triton.jit
def _chunk(n, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of each split of n."""
    return tl.cdiv(tl.cdiv(n, SPLITS), BLOCK_N) * BLOCK_N


@triton.jit
def _rows(cache_ptr, table_ptr, b, slots, there, S, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """Where slots (n,) of sequence b lie, (n, 1); the table is read where `there` is true only."""
    if PAGE:
        place = tl.load(table_ptr + b * S + slots // PAGE, mask=there, other=0).to(tl.int64) * PAGE + slots % PAGE
    else:
        place = b.to(tl.int64) * S + slots
    return cache_ptr + place[:, None] * WIDE


@triton.jit
def _tile(acc, top, total, q, q_turned, held, keys, there, scale):
    score = tl.dot(q, tl.trans(held), input_precision="ieee")
    score = tl.dot(q_turned, tl.trans(keys), score, input_precision="ieee") * scale
    score = tl.where(there[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(score - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = tl.dot(p.to(held.dtype), held, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total * fade + tl.sum(p, 1)


@triton.jit
def _attend_kernel(
    q_ptr, cache_ptr, pos_ptr, table_ptr, part_ptr, sums_ptr, S, scale,
    HEADS: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Parts (B, HEADS, SPLITS, RANK) and sums (B, HEADS, SPLITS, 2): the highest score and the sum, both in base 2. WHOLE: the
    one split's parts are the weighted means of latents, and there are no sums."""
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    b, split = tl.program_id(0) // BLOCKS, tl.program_id(1)
    heads, dims = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_RANK)
    offs_p = tl.arange(0, BLOCK_R)
    WIDE: tl.constexpr = RANK + R
    launch_next(TRIGGER)
    n = tl.load(pos_ptr + b) + 1
    chunk = _chunk(n, SPLITS, BLOCK_N)
    begin = split * chunk
    end = tl.minimum(begin + chunk, n)
    if begin >= n:
        return
    if EARLY:  # the first tile but for the newest slot, which `absorb` writes, as earlier steps have left it
        slots = begin + tl.arange(0, BLOCK_N)
        old = slots < tl.minimum(end, n - 1)
        rows = _rows(cache_ptr, table_ptr, b, slots, slots < end, S, PAGE, WIDE)
        held = tl.load(rows + dims[None, :], mask=old[:, None] & (dims < RANK)[None, :], other=0.0)
        keys = tl.load(rows + RANK + offs_p[None, :], mask=old[:, None] & (offs_p < R)[None, :], other=0.0)
    wait(PDL)
    q_rows = q_ptr + (b.to(tl.int64) * HEADS + heads)[:, None] * WIDE
    q = tl.load(q_rows + dims[None, :], mask=(heads < HEADS)[:, None] & (dims < RANK)[None, :], other=0.0)
    q_turned = tl.load(q_rows + RANK + offs_p[None, :], mask=(heads < HEADS)[:, None] & (offs_p < R)[None, :], other=0.0)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_RANK), tl.float32)
    if EARLY:  # past the first-level cache, which may hold the line as it was before
        new = (slots == n - 1)[:, None]
        held = tl.load(rows + dims[None, :], mask=new & (dims < RANK)[None, :], other=held, cache_modifier=".cg")
        keys = tl.load(rows + RANK + offs_p[None, :], mask=new & (offs_p < R)[None, :], other=keys, cache_modifier=".cg")
        acc, top, total = _tile(acc, top, total, q, q_turned, held, keys, slots < end, scale)
        begin += BLOCK_N
    for start in range(begin, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        there = slots < end
        rows = _rows(cache_ptr, table_ptr, b, slots, there, S, PAGE, WIDE)
        mask = there[:, None] & (dims < RANK)[None, :]
        held = tl.load(rows + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        mask = there[:, None] & (offs_p < R)[None, :]
        keys = tl.load(rows + RANK + offs_p[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        acc, top, total = _tile(acc, top, total, q, q_turned, held, keys, there, scale)
    at = (b.to(tl.int64) * HEADS + heads) * SPLITS + split
    mask = (heads < HEADS)[:, None] & (dims < RANK)[None, :]
    if WHOLE:
        acc = acc / total[:, None]
    else:
        tl.store(sums_ptr + at * 2, top, mask=heads < HEADS)
        tl.store(sums_ptr + at * 2 + 1, total, mask=heads < HEADS)
    tl.store(part_ptr + at[:, None] * RANK + dims[None, :], acc.to(part_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _values_kernel(
    part_ptr, sums_ptr, pos_ptr, v_up_ptr, y_ptr,
    HEADS: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    head, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    values, dims = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_RANK)
    up = v_up_ptr + (head * V + values)[:, None] * RANK + dims[None, :]
    up = tl.load(up, mask=(values < V)[:, None] & (dims < RANK)[None, :], other=0.0)
    launch_next(TRIGGER)
    n = tl.load(pos_ptr + b) + 1
    live = tl.cdiv(n, _chunk(n, SPLITS, BLOCK_N))
    wait(PDL)
    of = (b * HEADS + head) * SPLITS
    splits = tl.arange(0, SPLITS)
    top = tl.max(tl.load(sums_ptr + (of + splits) * 2, mask=splits < live, other=float("-inf")), 0)
    acc, total = tl.zeros((BLOCK_RANK,), tl.float32), 0.0
    for start in range(0, live, PARTS):
        some = start + tl.arange(0, PARTS)
        share = tl.exp2(tl.load(sums_ptr + (of + some) * 2, mask=some < live, other=float("-inf")) - top)
        total += tl.sum(share * tl.load(sums_ptr + (of + some) * 2 + 1, mask=some < live, other=0.0), 0)
        mask = (some < live)[:, None] & (dims < RANK)[None, :]
        parts = tl.load(part_ptr + (of + some)[:, None] * RANK + dims[None, :], mask=mask, other=0.0)
        acc += tl.sum(parts * share[:, None], 0)
    y = tl.sum(up.to(tl.float32) * (acc / total)[None, :], 1)
    tl.store(y_ptr + (b * HEADS + head) * V + values, y.to(y_ptr.dtype.element_ty), mask=values < V)


@triton.jit
def _values_of_rows_kernel(
    part_ptr, sums_ptr, pos_ptr, v_up_ptr, y_ptr, B,
    HEADS: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """As `_values_kernel`, for BLOCK_B sequences of a head; the one split of SPLITS = 1 has the means of latents."""
    head, rows = tl.program_id(0), tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    values, there = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V), rows < B
    launch_next(TRIGGER)
    n = tl.load(pos_ptr + rows, mask=there, other=0) + 1
    live = tl.where(there, tl.cdiv(n, _chunk(n, SPLITS, BLOCK_N)), 0)
    of = (rows.to(tl.int64) * HEADS + head) * SPLITS
    wait(PDL)
    top, total = tl.full((BLOCK_B,), -1.0e30, tl.float32), tl.full((BLOCK_B,), 1.0, tl.float32)
    if SPLITS > 1:
        for split in range(SPLITS):
            top = tl.maximum(top, tl.load(sums_ptr + (of + split) * 2, mask=split < live, other=-1.0e30))
        total = tl.where(there, 0.0, 1.0)
        for split in range(SPLITS):
            share = tl.exp2(tl.load(sums_ptr + (of + split) * 2, mask=split < live, other=-1.0e30) - top)
            total += share * tl.load(sums_ptr + (of + split) * 2 + 1, mask=split < live, other=0.0)
    y = tl.zeros((BLOCK_B, BLOCK_V), tl.float32)
    for start in range(0, RANK, BLOCK_RANK):
        dims = start + tl.arange(0, BLOCK_RANK)
        up = v_up_ptr + (head * V + values)[:, None] * RANK + dims[None, :]
        up = tl.load(up, mask=(values < V)[:, None] & (dims < RANK)[None, :], other=0.0)
        parts = part_ptr + of[:, None] * RANK + dims[None, :]
        if SPLITS == 1:
            latents = tl.load(parts, mask=there[:, None] & (dims < RANK)[None, :], other=0.0)
        else:
            latents = tl.zeros((BLOCK_B, BLOCK_RANK), tl.float32)
            for split in range(SPLITS):
                share = tl.exp2(tl.load(sums_ptr + (of + split) * 2, mask=split < live, other=-1.0e30) - top) / total
                mask = (split < live)[:, None] & (dims < RANK)[None, :]
                latents += tl.load(parts + split * RANK, mask=mask, other=0.0) * share[:, None]
        y = tl.dot(latents.to(up.dtype), tl.trans(up), y, input_precision="ieee")
    to = y_ptr + (rows.to(tl.int64) * HEADS + head)[:, None] * V + values[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & (values < V)[None, :])


def rows_for(batch: int) -> int:
    """Sequences per matrix product of `absorb` and `values`."""
    return min(MOST_ROWS, max(ROWS, triton.next_power_of_2(batch)))


def tiles_for(batch: int, heads: int, width: int, size: int) -> Tiles:
    """The tiles for so many sequences and heads, over caches of so many dims of `size` bytes."""
    for least, tiles in TILES[:-1] if size == 2 else ():
        if batch * heads >= least and (tiles.heads == ROWS or (heads >= tiles.heads and width <= WIDEST)):
            return tiles
    return TILES[-1][1]


def splits_for(blocks: int, programs: int = PROGRAMS) -> int:
    """Programs for each of so many blocks of heads of all sequences."""
    return min(MOST_SPLITS, max(1, triton.next_power_of_2(programs // blocks)))


def _refuse(call: LatentCall) -> str | None:
    if call.kv != PLAIN:
        return f"takes caches of 16 bits, not in {call.kv}"
    if call.rank > 512 or call.rotated > 128 or call.nope > 256:
        return f"takes latents of up to 512 values and keys of up to 256 and 128, not {call.rank}, {call.nope}, {call.rotated}"
    return None


@register("triton/latent", op="latent", dtypes=(*FLOATS, torch.float32), rank=50, refuse=_refuse)
def step(
    q: torch.Tensor, latent: torch.Tensor, cache: torch.Tensor, at: Places, f: Latent, config: Config | None = None
) -> torch.Tensor:
    """As `latent.step`; cache and table contiguous, positions int32. config: SPLITS."""
    if f.norm.groups != 1:
        return by_definition(q, latent, cache, at, f, config)
    pos, cos, sin, table, _ = at
    q, latent = (t if t.stride(1) == 1 else t.contiguous() for t in (q, latent))
    B, S, page, scale = q.shape[0], cache.shape[2], 0, f.position_scale
    if table is not None:
        S, page = table.shape[1], S
    by = (0.0, 1.0, 0.0) if scale is None else (scale.beta, float(scale.period), float(scale.offset))
    queries, width, turned = q.new_empty(B, f.heads, f.rank + f.rotated), padded(f.rank), padded(f.rotated)
    block, BLOCK_NOPE, rows = min(RANK_BLOCK, width), padded(f.nope), rows_for(B)
    _absorb_kernel[(f.heads + B, triton.cdiv(f.rank, block), triton.cdiv(B, rows))](
        q, latent, f.k_up, cache, pos, table, cos, sin, f.norm.weight, f.norm.bias, queries, B, S,
        q.stride(0), latent.stride(0), f.norm.eps, *by,
        HEADS=f.heads, NOPE=f.nope, R=f.rotated, RANK=f.rank, PAGE=page, NEIGHBOURS=f.pairing == "neighbours",
        SCALED=scale is not None, LAYER=f.norm.kind == "layer", WEIGHT=f.norm.weight is not None,
        BIAS=f.norm.bias is not None, BLOCK_B=rows, BLOCK_NOPE=BLOCK_NOPE, BLOCK_R=turned, BLOCK_RANK=block, WHOLE=width,
        num_warps=4, **pdl(q),
    )  # fmt: skip
    tiles = tiles_for(B, f.heads, width + turned, q.element_size())
    blocks = B * triton.cdiv(f.heads, tiles.heads)
    splits = config["SPLITS"] if config else splits_for(blocks, tiles.programs)
    of_rows = B > 1 and splits <= FEW_SPLITS
    whole = of_rows and splits == 1
    part = torch.empty(B, f.heads, splits, f.rank, dtype=q.dtype if whole else torch.float32, device=q.device)
    sums = torch.empty(B, f.heads, splits, 2, dtype=torch.float32, device=q.device)
    _attend_kernel[(blocks, splits)](
        queries, cache, pos, table, part, sums, S, f.scale * LOG2E, HEADS=f.heads, R=f.rotated, RANK=f.rank, SPLITS=splits,
        PAGE=page, BLOCK_H=tiles.heads, BLOCK_R=turned, BLOCK_RANK=width, BLOCK_N=tiles.slots, EARLY=EARLY and not page,
        WHOLE=whole, num_warps=8, num_stages=2, **pdl(q),
    )  # fmt: skip
    y, BLOCK_V = q.new_empty(B, f.heads * f.v_dim), min(VALUES, triton.next_power_of_2(f.v_dim))
    shape = {"HEADS": f.heads, "RANK": f.rank, "V": f.v_dim, "SPLITS": splits, "BLOCK_N": tiles.slots}
    if of_rows:
        _values_of_rows_kernel[(f.heads, triton.cdiv(f.v_dim, BLOCK_V), triton.cdiv(B, rows))](
            part, sums, pos, f.v_up, y, B, **shape,
            BLOCK_B=rows, BLOCK_RANK=min(VALUES_RANK, width), BLOCK_V=max(ROWS, BLOCK_V), num_warps=4, **pdl(q),
        )  # fmt: skip
    else:
        _values_kernel[(f.heads, triton.cdiv(f.v_dim, BLOCK_V), B)](
            part, sums, pos, f.v_up, y, **shape, BLOCK_RANK=width, BLOCK_V=BLOCK_V, PARTS=PARTS, num_warps=8, **pdl(q)
        )
    return y
