"""Latent attention of prompts on tensor cores: computes heads' keys and values from the latents, then ordinary attention.

    place   (tokens, heads in blocks, and one more): queries are turned; the last program of a token writes its normed latent
            and turned key into the cache
    up      two products of torch's over the latents of all tokens that are attended to, (tokens, heads * nope) and
            (tokens, heads * v_dim), in the cache's dtype
    attend  (tiles of tokens, heads): a head's own keys and the turned one, which heads share; causal, online in base 2

Passes of the server of up to MOST_ROWS tokens have no shape that depends on the texts, so that a CUDA graph can record them:
`up` makes keys and values of the pass's own tokens alone, and `attend` goes on from what `latent_past` gives of earlier ones.

Limits  fp16, bf16 and fp32 over caches of the same; heads of up to 256 values; latents of up to 512; norms of one group
Work    of a pair of tokens and a head nope + rotated + v_dim products, a third of the absorbed form's 2 rank + rotated; keys
        and values are made again for every piece of a prompt, which is as much work as rank (nope + v_dim) / (nope + rotated +
        v_dim) queries are, 400 of DeepSeek's
Source  own; FlashAttention-2's loop (Dao 2023, arXiv:2307.08691), DeepSeek-V2 (arXiv:2405.04434)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lowq_kernels import gpu
from lowq_kernels.decode import latent as definition
from lowq_kernels.decode.attend_triton import LOG2E
from lowq_kernels.decode.kv import Cache
from lowq_kernels.decode.kv_triton import padded
from lowq_kernels.decode.latent import Latent
from lowq_kernels.decode.latent_past import BLOCK_K, SMEM, merged, past_of, tile_of
from lowq_kernels.decode.prepare_triton import normed, pairs, statistics
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import CHUNK, Runs

MOST_ROWS = 1024  # tokens of the largest pass that the server records for every model
HEADS_AT_ONCE = 8
MOST, MOST_RANK = 256, 512  # max. values of each part of a head (unrotated, rotated, value), and of a latent
SIZES = ["T", "start", "S", "n"]


@triton.jit(do_not_specialize=SIZES[:3])
def _place_kernel(
    q_ptr, x_ptr, cache_ptr, rows_ptr, pos_ptr, table_ptr, cos_ptr, sin_ptr, weight_ptr, bias_ptr, out_ptr, new_ptr,
    T, start, S, eps, beta, period, offset,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr, NEIGHBOURS: tl.constexpr,
    SCALED: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, NEW: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """S: slots of a text's cache, or the width of the table. NEW: the entries go to new (tokens, rank + rotated), too."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_r = tl.arange(0, BLOCK_R)
    partner, first, angle = pairs(offs_r, R, NEIGHBOURS)
    mask_r = offs_r < R
    if PAGE:
        pos, text = tl.load(pos_ptr + row).to(tl.int64), tl.load(rows_ptr + row)
        place = tl.load(table_ptr + text * S + pos // PAGE).to(tl.int64) * PAGE + pos % PAGE
    else:
        pos = start + row % T
        place = row // T * S + pos
    cos = tl.load(cos_ptr + pos * R + angle, mask=mask_r, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + pos * R + angle, mask=mask_r, other=0.0).to(tl.float32)
    sin = tl.where(first, -sin, sin)
    if part < tl.num_programs(1) - 1:
        heads, offs_n = part * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_NOPE)
        by = 1.0
        if SCALED:
            by = 1.0 + beta * tl.log(1.0 + tl.floor((pos.to(tl.float32) + offset) / period))
        at = (row * HEADS + heads)[:, None] * (NOPE + R)
        mask = (heads < HEADS)[:, None] & (offs_n < NOPE)[None, :]
        q = tl.load(q_ptr + at + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at + offs_n[None, :], (q * by).to(out_ptr.dtype.element_ty), mask=mask)
        mask = (heads < HEADS)[:, None] & mask_r[None, :]
        q = tl.load(q_ptr + at + NOPE + offs_r[None, :], mask=mask, other=0.0).to(tl.float32)
        other = tl.load(q_ptr + at + NOPE + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        q = (q * cos[None, :] + other * sin[None, :]) * by
        tl.store(out_ptr + at + NOPE + offs_r[None, :], q.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        token, slot, offs = x_ptr + row * (RANK + R), cache_ptr + place * (RANK + R), tl.arange(0, BLOCK_RANK)
        there = offs < RANK
        dtype = cache_ptr.dtype.element_ty
        x = tl.load(token + offs, mask=there, other=0.0).to(tl.float32)
        mean, inverse = statistics(x, there, RANK, eps, LAYER)
        x = normed(x, mean, inverse, weight_ptr, bias_ptr, offs, there, WEIGHT, BIAS).to(dtype)
        tl.store(slot + offs, x, mask=there)
        key = tl.load(token + RANK + offs_r, mask=mask_r, other=0.0).to(tl.float32)
        beside = tl.load(token + RANK + partner, mask=mask_r, other=0.0).to(tl.float32)
        key = (key * cos + beside * sin).to(dtype)
        tl.store(slot + RANK + offs_r, key, mask=mask_r)
        if NEW:
            tl.store(new_ptr + row * (RANK + R) + offs, x, mask=there)
            tl.store(new_ptr + row * (RANK + R) + RANK + offs_r, key, mask=mask_r)


@triton.jit
def _block(
    acc, top, total, q, turned, k_ptr, keys_ptr, v_ptr, n0, end, rows, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Slots n0 .. n0 + BLOCK_N of a text, one of which some row does not see with EDGE."""
    slots = n0 + tl.arange(0, BLOCK_N)
    there, at = (slots < end)[:, None], slots.to(tl.int64)[:, None]
    offs_n, offs_r, offs_v = tl.arange(0, BLOCK_NOPE)[None, :], tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)[None, :]
    k = tl.load(k_ptr + at * (HEADS * NOPE) + offs_n, mask=there & (offs_n < NOPE), other=0.0)
    keys = tl.load(keys_ptr + at * (RANK + R) + offs_r, mask=there & (offs_r < R), other=0.0)
    v = tl.load(v_ptr + at * (HEADS * V) + offs_v, mask=there & (offs_v < V), other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    score = tl.dot(turned, tl.trans(keys), score, input_precision="ieee") * scale
    if EDGE:
        score = tl.where(slots[None, :] <= rows[:, None], score, -1.0e30)
    higher = tl.maximum(top, tl.max(score, 1))
    p, fade = tl.exp2(score - higher[:, None]), tl.exp2(top - higher)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total * fade + tl.sum(p, 1)


@triton.jit(do_not_specialize=SIZES)
def _attend_kernel(
    q_ptr, k_ptr, latents_ptr, v_ptr, tiles_ptr, pos_ptr, past_ptr, weight_ptr, y_ptr, T, start, S, n, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, TILES: tl.constexpr,
    PAST: tl.constexpr, PAST_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NOPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Tiles: `Runs.spans`; without them texts of T tokens, whose keys and values are n each, latents S apart. PAST: 0,
    or in how many splits of whole tiles of PAST_N slots `past` has attended to the tokens before the pass; then tiles are
    `Runs.tiles`, and keys, values and latents those of the pass's tokens."""
    number, h = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # tiles with the longest past first
    if PAST:
        first, last, text = tile_of(tiles_ptr, number, BLOCK_M, BLOCK_M)
        if first >= last:
            return
        pos, base = first - text, text.to(tl.int64)
        of_latents = base
    elif TILES:
        tile = tiles_ptr + 4 * number
        first, last, pos, base = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3).to(tl.int64)
        of_latents = base
    else:
        each = tl.cdiv(T, BLOCK_M)
        text, at = number // each, number % each * BLOCK_M
        first, last, pos, base = text * T + at, text * T + tl.minimum(at + BLOCK_M, T), start + at, text.to(tl.int64) * n
        of_latents = text.to(tl.int64) * S
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_NOPE)[None, :]
    offs_r, offs_v = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)[None, :]
    here, rows = (first + offs_m < last)[:, None], pos + offs_m
    own = ((first + offs_m).to(tl.int64)[:, None] * HEADS + h) * (NOPE + R)
    q = tl.load(q_ptr + own + offs_n, mask=here & (offs_n < NOPE), other=0.0)
    turned = tl.load(q_ptr + own + NOPE + offs_r, mask=here & (offs_r < R), other=0.0)
    k_head, v_head = k_ptr + (base * HEADS + h) * NOPE, v_ptr + (base * HEADS + h) * V
    keys = latents_ptr + of_latents * (RANK + R) + RANK
    acc, total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    top, end = tl.full((BLOCK_M,), -1.0e30, tl.float32), pos + last - first
    if PAST:
        of_rows = ((first + offs_m).to(tl.int64) * HEADS + h)[:, None]
        acc, top, total = merged(
            past_ptr, weight_ptr, tl.load(pos_ptr + text), of_rows, offs_v, here, V, PAST, PAST_N, BLOCK_M, BLOCK_V
        )
    whole = (pos + 1) // BLOCK_N * BLOCK_N  # slots before it every row sees
    for n0 in range(0, whole, BLOCK_N):
        acc, top, total = _block(
            acc, top, total, q, turned, k_head, keys, v_head, n0, end, rows, scale, HEADS, NOPE, R, RANK, V, BLOCK_N,
            BLOCK_NOPE, BLOCK_R, BLOCK_V, EDGE=False,
        )  # fmt: skip
    for n0 in range(whole, end, BLOCK_N):
        acc, top, total = _block(
            acc, top, total, q, turned, k_head, keys, v_head, n0, end, rows, scale, HEADS, NOPE, R, RANK, V, BLOCK_N,
            BLOCK_NOPE, BLOCK_R, BLOCK_V, EDGE=True,
        )  # fmt: skip
    y = y_ptr + ((first + offs_m).to(tl.int64)[:, None] * HEADS + h) * V + offs_v
    tl.store(y, (acc / total[:, None]).to(y_ptr.dtype.element_ty), mask=here & (offs_v < V))


def refuse(dtype: torch.dtype, cache: Cache, f: Latent) -> str | None:
    """Why the kernels do not take a prompt of this dtype, or None."""
    if not isinstance(cache, torch.Tensor) or cache.dtype != dtype:
        return "takes caches of the model's dtype"
    if max(f.nope, f.rotated, f.v_dim) > MOST or f.rank > MOST_RANK:
        return f"takes parts of heads of up to {MOST} values and latents of up to {MOST_RANK}"
    if f.norm.groups != 1 or f.k_up.dtype != dtype:
        return "takes norms of one group and weights of the model's dtype"
    return None


def prompt(
    q: torch.Tensor, latent: torch.Tensor, cache: Cache, start: int, cos: torch.Tensor, sin: torch.Tensor, f: Latent
) -> torch.Tensor:
    """As `latent.prompt`."""
    if refuse(q.dtype, cache, f):
        return definition.prompt(q, latent, cache, start, cos, sin, f)
    assert isinstance(cache, torch.Tensor)
    (B, T), S, n = q.shape[:2], cache.shape[2], start + q.shape[1]
    turned, _ = _place(q.flatten(0, 1), latent.flatten(0, 1), cache, None, (T, start), cos, sin, f)
    k, v = _up(cache[:, 0, :n, : f.rank], f)
    return _attend(turned, k, cache, v, None, (T, start, S, n), B, f).reshape(B, T, -1)


def packed(
    q: torch.Tensor,
    latent: torch.Tensor,
    cache: Cache,
    p: Packed,
    cos: torch.Tensor,
    sin: torch.Tensor,
    f: Latent,
    runs: Runs | None = None,
) -> torch.Tensor:
    """As `latent.packed`; runs: the tokens by sequence, as the host knows them, or as it has sent them to the device."""
    if runs is None or not runs.some or refuse(q.dtype, cache, f):
        return definition.packed(q, latent, cache, p, cos, sin, f)
    assert isinstance(cache, torch.Tensor)
    if runs.given is not None and (not runs.each or q.shape[0] <= MOST_ROWS):
        turned, new = _place(q, latent, cache, p, (1, 0), cos, sin, f, keep=True)
        k, v = _up(new[:, : f.rank], f)
        return _attend(turned, k, new, v, runs, (1, 0, 0, 0), 1, f, (p, *past_of(turned, cache, p, runs, f)))
    turned, _ = _place(q, latent, cache, p, (1, 0), cos, sin, f)
    size = cache.shape[2]
    entries = torch.cat([_held(cache, p.table[run.row, : -(-run.length // size)], run.length) for run in runs.each])
    k, v = _up(entries[:, : f.rank], f)
    return _attend(turned, k, entries, v, runs, (1, 0, 0, 0), 1, f)


def _held(cache: torch.Tensor, blocks: torch.Tensor, n: int) -> torch.Tensor:
    """The n latents (n, rank + rotated) in those blocks."""
    return cache.index_select(0, blocks).flatten(0, 2)[:n]


def _up(latents: torch.Tensor, f: Latent) -> Sequence[torch.Tensor]:
    """Keys (..., heads * nope) and values (..., heads * v_dim) of latents (..., rank)."""
    return [torch.matmul(latents, up.flatten(0, 1).T).contiguous() for up in (f.k_up, f.v_up)]


def _place(
    q: torch.Tensor, latent: torch.Tensor, cache: torch.Tensor, p: Packed | None, of_texts: tuple[int, int], cos: torch.Tensor,
    sin: torch.Tensor, f: Latent, keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The rotated queries; writes the cache entries. keep: returns these as well, (tokens, rank + rotated)."""
    q, latent, scale = q.contiguous(), latent.contiguous(), f.position_scale
    by = (0.0, 1.0, 0.0) if scale is None else (scale.beta, float(scale.period), float(scale.offset))
    tables = (None, None, None) if p is None else (p.rows, p.pos, p.table)
    S, page = (cache.shape[2], 0) if p is None else (p.table.shape[1], cache.shape[2])
    turned, parts = torch.empty_like(q), triton.cdiv(f.heads, HEADS_AT_ONCE)
    new = torch.empty_like(latent) if keep else latent
    _place_kernel[(q.shape[0], parts + 1)](
        q, latent, cache, *tables, cos, sin, f.norm.weight, f.norm.bias, turned, new, *of_texts, S, f.norm.eps, *by,
        HEADS=f.heads, NOPE=f.nope, R=f.rotated, RANK=f.rank, PAGE=page, NEIGHBOURS=f.pairing == "neighbours",
        SCALED=scale is not None, LAYER=f.norm.kind == "layer", WEIGHT=f.norm.weight is not None, BIAS=f.norm.bias is not None,
        NEW=keep, BLOCK_H=HEADS_AT_ONCE, BLOCK_NOPE=padded(f.nope), BLOCK_R=padded(f.rotated), BLOCK_RANK=padded(f.rank),
        num_warps=4,
    )  # fmt: skip
    return turned, new


def _attend(
    q: torch.Tensor, k: torch.Tensor, latents: torch.Tensor, v: torch.Tensor, runs: Runs | None,
    sizes: tuple[int, int, int, int], texts: int, f: Latent, after: tuple[Packed, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """after: the tokens of a pass, and what `past_of` gives."""
    wide = max(padded(f.nope), padded(f.v_dim)) > 128 or q.dtype == torch.float32
    BLOCK_M, BLOCK_N = (64, 32) if wide or gpu.here(q.device.index).smem_block < SMEM else (128, 64)
    BLOCK_M, warps = (BLOCK_M, 8) if after is None else (CHUNK, 8 if BLOCK_N < 64 else 4)
    tiles = None if runs is None else runs.tiles if after is not None else runs.spans(BLOCK_M)
    pos, past, weight = (None, None, None) if after is None else (after[0].pos, *after[1:])
    splits = 0 if weight is None else weight.shape[2]
    new = torch.empty if runs is None or runs.whole else torch.zeros
    y = new(q.shape[0], f.heads * f.v_dim, dtype=q.dtype, device=q.device)
    _attend_kernel[(texts * triton.cdiv(sizes[0], BLOCK_M) if tiles is None else tiles.shape[0], f.heads)](
        q, k, latents, v, tiles, pos, past, weight, y, *sizes, f.scale * LOG2E, HEADS=f.heads, NOPE=f.nope, R=f.rotated,
        RANK=f.rank, V=f.v_dim, TILES=tiles is not None, PAST=splits, PAST_N=BLOCK_K, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_NOPE=padded(f.nope), BLOCK_R=padded(f.rotated), BLOCK_V=padded(f.v_dim), num_warps=warps, num_stages=2,
    )  # fmt: skip
    return y
