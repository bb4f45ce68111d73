"""triton/attend: one token's q/k norm, RoPE, cache write and attention over its sequence's cache, in one kernel.

Maths   softmax(scale * rope(q) . rope(K)^T) V over slots first .. pos, online in base 2; GQA: the G = HQ / HKV queries of a
        key head are the rows of one tl.dot (padded to 16)
Grid    (B * HKV, SPLITS): each program takes an equal chunk of the live slots, so short texts leave programs idle and
        long ones keep them all busy; the last of a sequence-head to finish adds the parts up, in split order, so the
        result does not depend on who came last
New     the token's own k and v go from registers into the tile as well as into the cache: no program reads slot `pos`
Early   with programmatic dependent launch, the position and earlier slots are read before the previous kernel ends: they were
        written in an earlier step (launch.py)
Few bits  KV 8 or 4 (kv_triton.py): another kernel prepares q and the new k and v, and the newest slot is read like the others
Paged   PAGE slots per block, found by a table that is read one tile ahead; 0: one contiguous cache per sequence
Capped  a soft cap of scores, chunks, and queries of layers without keys of their own are compiled in where a layer has them
Limits  D <= 512 (256 over a cache in few bits), S * D < 2^31 per head; counters start at zero and are left at zero
Dtypes  fp16, bf16, fp32 (not by way of tf32)
Source  own; split-KV as in Flash-Decoding (Dao et al. 2023)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.attend import AttendCall
from lowq_kernels.decode.kv import PLAIN, Cache, Coded, part_of
from lowq_kernels.decode.kv_triton import UNIT, codes, dims, facts, held, numbers, padded, place, raw, scales
from lowq_kernels.decode.launch import launch_next, pdl, wait
from lowq_kernels.decode.prompt_call import PromptCall
from lowq_kernels.decode.reference import Heads, Places
from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.lasting import lasting

# dims of a head up to which -> slots of a tile, warps. Registers hold two tiles of keys and two of values: of heads of 256
# four warps do not hold 64 slots (gemma2, 8 layers at batch 1: 551 us a step, with eight warps 420)
TILES = {128: (64, 4), 256: (64, 8), 512: (16, 8)}
PROGRAMS = 256  # target number of programs: about two per multiprocessor
MOST_SPLITS = 16
MERGED = 256  # dims of a head that its last program merges at once: registers hold no more of the partial sums
PAGED_SPLITS = 4  # min. splits over a paged cache: in a large batch one long sequence must not make the others wait
LEAST = 512  # min. slots per split of a paged cache where heads alone fill the GPU: short sequences are not split
LOG2E = 1.4426950408889634


@triton.jit
def _heads(rows, norm_ptr, offs_d, partner, cos, sin, mask, mask_d, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads at `rows` (n, 1), as (n, BLOCK_D) fp32, normed and rotated. `partner` is the other half of each rotated pair."""
    x = tl.load(rows + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * inverse * tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        other = other * inverse * tl.load(norm_ptr + partner, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    return x * cos[None, :] + other * sin[None, :]


@triton.jit
def capped(score, cap):
    """cap * tanh(t) of scores t * 2 log2(e), fp32: tanh(t) = 1 - 2 / (exp(2 t) + 1)."""
    return cap - 2.0 * cap / (tl.exp2(score) + 1.0)


@triton.jit
def _in_pages(table, slots, end, h, HKV: tl.constexpr, PAGE: tl.constexpr):
    """Where slots (n,) of key head `h` lie in a paged cache, in rows of D; the table is read below `end` only."""
    pages = tl.load(table + slots // PAGE, mask=slots < end, other=0).to(tl.int64)
    return (pages * HKV + h) * PAGE + slots % PAGE


@triton.jit
def _attend_kernel(
    qkv_ptr,
    k_ptr,
    v_ptr,
    pos_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    sinks_ptr,
    part_ptr,
    sums_ptr,
    count_ptr,
    y_ptr,
    k_scales,
    v_scales,
    S,
    scale,
    eps,
    window,
    factor,
    cap,
    chunk_of,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PARTS_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    NORM: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
    KV: tl.constexpr,
    PART: tl.constexpr,
    NATIVE: tl.constexpr,
    CAPPED: tl.constexpr,
    CHUNKED: tl.constexpr,
    WRITES: tl.constexpr,
    MERGED: tl.constexpr,
):
    head, split = tl.program_id(0), tl.program_id(1)  # head: which key head of which sequence
    b, h = head // HKV, head % HKV
    offs_d, offs_g = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    mask_d, mask_g = offs_d < D, offs_g < G
    mask_gd = mask_g[:, None] & mask_d[None, :]
    launch_next(TRIGGER)
    wait((KV or not WRITES) and PDL)  # a kernel before this one has written the newest slot
    pos = tl.load(pos_ptr + b)
    n = pos + 1
    first = tl.maximum(n - window, 0)
    if CHUNKED:
        first = tl.maximum(first, pos // chunk_of * chunk_of)
    chunk = tl.cdiv(tl.cdiv(n - first, SPLITS), BLOCK_N) * BLOCK_N
    if PAGE:
        chunk = tl.maximum(chunk, LEAST)
    live = tl.cdiv(n - first, chunk)  # splits that have slots
    if split >= live:
        return
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, n)
    old_end = end if KV or not WRITES else tl.minimum(end, pos)
    slots = head.to(tl.int64) * S * (1 if KV else D)
    dtype = y_ptr.dtype.element_ty
    offs_n = begin + tl.arange(0, BLOCK_N)
    if PAGE:  # blocks of this tile and of the next one; only the addresses of slots differ from a contiguous cache
        table = table_ptr + b * S
        at, soon = _in_pages(table, offs_n, end, h, HKV, PAGE), offs_n + BLOCK_N
        ahead_at = _in_pages(table, soon, end, h, HKV, PAGE)
        tile = at if KV else at[:, None] * D + offs_d[None, :]
    else:
        tile = slots + offs_n if KV else slots + offs_n[:, None] * D + offs_d[None, :]
    if KV:
        k = codes(k_ptr, tile, offs_n < old_end, offs_d, dtype, D, BLOCK_D, KV, NATIVE)
        v = codes(v_ptr, tile, offs_n < old_end, offs_d, dtype, D, BLOCK_D, KV, NATIVE)
        k_step, k_low = scales(k_scales, tile, offs_n < old_end, KV)
        v_step, v_low = scales(v_scales, tile, offs_n < old_end, KV)
    else:
        old = (offs_n < old_end)[:, None] & mask_d[None, :]
        k = tl.load(k_ptr + tile, mask=old, other=0.0)
        v = tl.load(v_ptr + tile, mask=old, other=0.0)
    partner = tl.where(offs_d < R // 2, offs_d + R // 2, tl.where(offs_d < R, offs_d - R // 2, offs_d))
    rotated = offs_d < R
    cos = tl.load(cos_ptr + pos * R + offs_d, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + pos * R + offs_d, mask=rotated, other=0.0).to(tl.float32)
    sin = tl.where(offs_d < R // 2, -sin, sin)
    wait(PDL and not KV and WRITES)

    if KV:  # queries as `kv_triton.place` has left them
        dim = dims(offs_d, BLOCK_D, KV)
        queries = qkv_ptr + (head.to(tl.int64) * G + offs_g)[:, None] * D + dim[None, :]
        q = tl.load(queries, mask=mask_g[:, None] & (dim < D)[None, :], other=0.0)
        q_sum = tl.sum(q.to(tl.float32), 1)
    else:
        token = qkv_ptr + b.to(tl.int64) * (G + (2 if WRITES else 0)) * HKV * D
        q_rows = token + (h * G + offs_g)[:, None] * D
        q = _heads(q_rows, q_norm_ptr, offs_d, partner, cos, sin, mask_gd, mask_d, eps, D, NORM).to(dtype)
    if not KV and WRITES:
        k_row = token + (HKV * G + h) * D + tl.zeros((1, 1), tl.int32)
        new_k = _heads(k_row, k_norm_ptr, offs_d, partner, cos, sin, mask_d[None, :], mask_d, eps, D, NORM).to(dtype)
        new_v = tl.load(token + (HKV * G + HKV + h) * D + offs_d, mask=mask_d, other=0.0)[None, :]
        if (begin <= pos) & (pos < end):  # this program's chunk holds the new token
            if PAGE:
                page = tl.load(table + pos // PAGE).to(tl.int64)
                here = ((page * HKV + h) * PAGE + pos % PAGE) * D + offs_d[None, :]
            else:
                here = slots + pos * D + offs_d[None, :]
            tl.store(k_ptr + here, new_k, mask=mask_d[None, :])
            tl.store(v_ptr + here, new_v, mask=mask_d[None, :])

    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total, rest = tl.zeros((BLOCK_G,), tl.float32), tl.zeros((BLOCK_G,), tl.float32)
    if SINKS:  # one score more, without a value, in the first split
        sink = tl.load(sinks_ptr + h * G + offs_g, mask=mask_g, other=0.0) * 1.4426950408889634
        top, total = tl.where(split == 0, sink, top), tl.where(split == 0, 1.0, total)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        if not WRITES and not KV:
            k_now, v_now = k, v
        elif KV:
            k_now, v_now, k_by, k_more, v_by, v_more = k, v, k_step, k_low, v_step, v_low
        else:
            is_new = (offs_n == pos)[:, None]
            k_now = tl.where(is_new, new_k, k)
            v_now = tl.where(is_new, new_v, v)
        ahead = offs_n + BLOCK_N  # prefetch the next tile while this one is used
        if PAGE:
            tile = ahead_at if KV else ahead_at[:, None] * D + offs_d[None, :]
            ahead_at = _in_pages(table, ahead + BLOCK_N, end, h, HKV, PAGE)
        else:
            tile = slots + ahead if KV else slots + ahead[:, None] * D + offs_d[None, :]
        if KV:
            k = codes(k_ptr, tile, ahead < old_end, offs_d, dtype, D, BLOCK_D, KV, NATIVE)
            v = codes(v_ptr, tile, ahead < old_end, offs_d, dtype, D, BLOCK_D, KV, NATIVE)
            k_step, k_low = scales(k_scales, tile, ahead < old_end, KV)
            v_step, v_low = scales(v_scales, tile, ahead < old_end, KV)
        else:
            old = (ahead < old_end)[:, None] & mask_d[None, :]
            k = tl.load(k_ptr + tile, mask=old, other=0.0)
            v = tl.load(v_ptr + tile, mask=old, other=0.0)
        score = tl.dot(q, tl.trans(k_now), input_precision="ieee") * scale
        if KV:
            score = score * k_by[None, :] + q_sum[:, None] * (k_more * scale)[None, :]
        if CAPPED:
            score = capped(score, cap)
        score = tl.where((offs_n < end)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        if KV:
            rest = rest * fade + tl.sum(p * v_more[None, :], 1)
            p = p * (v_by * UNIT)[None, :]
        acc = tl.dot(p.to(dtype), v_now, acc * fade[:, None], input_precision="ieee")
        top = higher

    if KV:
        acc = held(acc / total[:, None], rest / total, factor, offs_d, dtype, D, BLOCK_D, KV, PART) * total[:, None]
    out = y_ptr + (b.to(tl.int64) * HKV + h) * G * D
    if live == 1:
        y = acc / total[:, None]
        tl.store(out + offs_g[:, None] * D + offs_d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_gd)
        return
    part = part_ptr + head.to(tl.int64) * SPLITS * G * D
    sums = sums_ptr + head.to(tl.int64) * SPLITS * G * 2
    tl.store(part + (split * G + offs_g)[:, None] * D + offs_d[None, :], acc, mask=mask_gd)
    tl.store(sums + split * G * 2 + offs_g, top, mask=mask_g)
    tl.store(sums + split * G * 2 + G + offs_g, total, mask=mask_g)
    tl.debug_barrier()  # all threads write their part before one of them announces it
    if tl.atomic_add(count_ptr + head, 1, sem="acq_rel") != live - 1:
        return
    tl.store(count_ptr + head, 0)
    offs_s, offs_c = tl.arange(0, SPLITS), tl.arange(0, PARTS_G)  # issue all loads at once: one trip to memory
    there = (offs_s < live)[:, None] & (offs_c < G)[None, :]
    at = sums + offs_s[:, None] * G * 2 + offs_c[None, :]
    tops = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(at + G, mask=there, other=0.0, cache_modifier=".cg")
    share = tl.exp2(tops - tl.max(tops, 0)[None, :])
    whole = tl.sum(totals * share, 0)[:, None]
    rows = part + (offs_s[:, None] * G + offs_c[None, :])[:, :, None] * D
    for i in tl.static_range(BLOCK_D // MERGED):
        offs_m = i * MERGED + tl.arange(0, MERGED)
        mask = there[:, :, None] & (offs_m < D)[None, None, :]
        accs = tl.load(rows + offs_m[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        y = tl.sum(accs * share[:, :, None], 0) / whole
        mask_cd = (offs_c < G)[:, None] & (offs_m < D)[None, :]
        tl.store(out + offs_c[:, None] * D + offs_m[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_cd)


@lasting
def _scratch(device: torch.device, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts, sums and counters for `heads` sequence-heads of `width` fp32 each.

    Never freed: CUDA graphs hold their addresses. Launches on one stream run one after another, so one set serves them all.
    """
    part = torch.empty(heads * width, dtype=torch.float32, device=device)
    return part, torch.empty_like(part), torch.zeros(heads, dtype=torch.int32, device=device)


def score_factor(h: Heads) -> float:
    """The factor of q . k: scores are exponents of 2; under a soft cap they are what `capped` takes."""
    return 2 * LOG2E * h.scale / h.softcap if h.softcap else h.scale * LOG2E


def splits_for(heads: int) -> int:
    """Programs per sequence-head."""
    return min(MOST_SPLITS, max(1, triton.next_power_of_2(PROGRAMS // heads)))


def cut(heads: int, paged: bool) -> Config:
    """How the slots of so many sequence-heads are shared out: SPLITS programs at most, of LEAST slots at least."""
    if not paged:
        return {"SPLITS": splits_for(heads), "LEAST": 0}
    return {"SPLITS": max(PAGED_SPLITS, splits_for(heads)), "LEAST": LEAST if heads >= PROGRAMS else 0}


def refuse(call: AttendCall | PromptCall) -> str | None:
    """Why Triton's kernels of attention do not take a call, or None."""
    most = 512 if call.kv == PLAIN else 256
    return None if call.D in range(most + 1) else f"takes heads of up to {most} over {call.kv}, not D={call.D} over {call.kv}"


@register(
    "triton/attend",
    op="attend",
    devices=("cuda",),
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    rank=50,
    refuse=refuse,
)
def attend(
    qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads, config: Config | None = None
) -> torch.Tensor:
    """As `reference.attend`; qkv, caches and table contiguous, positions int32. config: as of `cut`."""
    (pos, cos, sin, table, _), B, S, G = at, qkv.shape[0], k_cache.shape[2], h.HQ // h.HKV
    y = torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    page, slots, config = 0, S, config or cut(B * h.HKV, table is not None)
    if table is not None:  # S: the table's width
        page, S, slots = S, table.shape[1], table.shape[1] * S
    if isinstance(k_cache, Coded) and isinstance(v_cache, Coded):
        tokens, qkv = qkv, torch.empty(B, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
        place(tokens, k_cache, v_cache, cos, sin, h, qkv, pos=pos, table=table)
    part, sums, count = _scratch(qkv.device, B * h.HKV, config["SPLITS"] * G * max(h.D, 2))
    BLOCK_D = padded(h.D)
    BLOCK_N, warps = TILES[max(128, BLOCK_D)]
    _attend_kernel[(B * h.HKV, config["SPLITS"])](
        qkv,
        numbers(k_cache),
        numbers(v_cache),
        pos,
        table,
        cos,
        sin,
        h.q_norm,
        h.k_norm,
        h.sinks,
        part,
        sums,
        count,
        y,
        raw(k_cache),
        raw(v_cache),
        S,
        score_factor(h),
        h.eps,
        h.window or slots + 1,
        part_of(h.D) ** -0.5,
        h.softcap * LOG2E,
        h.chunk,
        HKV=h.HKV,
        G=G,
        D=h.D,
        R=cos.shape[1],
        PARTS_G=triton.next_power_of_2(G),
        BLOCK_G=max(16, triton.next_power_of_2(G)),
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
        PAGE=page,
        NORM=h.q_norm is not None,
        SINKS=h.sinks is not None,
        CAPPED=h.softcap != 0.0,
        CHUNKED=h.chunk != 0,
        WRITES=h.writes,
        MERGED=min(BLOCK_D, MERGED),
        num_warps=warps,
        num_stages=1,
        **config,
        **facts(k_cache),
        **pdl(qkv),
    )
    return y
