"""attend_prompt: many tokens' q/k norm, RoPE and cache write in one kernel, causal attention over the cache in a second.

Maths   softmax(scale * rope(q) . rope(K)^T) V over slots 0 .. the token's own (the last `window` of them), online in base 2
Grid    place   (B * T, heads in blocks): q goes where y will be, k and v into the cache
        attend  (T in blocks of BLOCK_M, B * HQ): tokens with the longest past first; queries of one key head run side by
                side, so that its keys come from the second-level cache
Packed  tokens of several sequences concatenated, caches in blocks of PAGE slots: a table of tiles names each program's tokens
Limits  fp16 and bf16, D <= 512 (256 over a cache in few bits); any T, start and window. Sizes are run-time arguments, so a
        new prompt length needs no compilation (torch's cuDNN attention takes 40 ms to plan each new length, 0.6 s for the
        first)
Source  own; FlashAttention-2's loop (Dao 2023, arXiv:2307.08691)
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode import kv, reference
from lowq_kernels.decode.attend_triton import LOG2E, _heads, capped, refuse, score_factor
from lowq_kernels.decode.kv import Cache, Coded
from lowq_kernels.decode.kv_triton import UNIT, codes, dims, held, numbers, padded, place, raw, scales
from lowq_kernels.decode.kv_triton import facts as facts_of
from lowq_kernels.decode.prompt_call import PromptCall, Sizes
from lowq_kernels.decode.reference import Heads, Packed
from lowq_kernels.dispatch.registry import Choice, Config, capability, find, named, register
from lowq_packers.scheme import Act

CONFIG = {"BLOCK_M": reference.TILE, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
# for heads past 128 dims, whose tiles are twice as large
WIDE = {"BLOCK_M": reference.TILE // 2, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
WIDEST = {"BLOCK_M": reference.TILE // 2, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}  # past 256
FP32 = {"BLOCK_N": 16, "num_stages": 1}  # beside those: 128 rows of 128 dims take 64 KB, and a small GPU's block has 99 KB
FP32_MOST = 256  # dims: 64 rows of 512 would take 196 KB
HEADS_AT_ONCE = 8
SIZES = ["T", "start", "S", "WIDTH", "window", "chunk"]


@triton.jit(do_not_specialize=SIZES[:4])
def _place_kernel(
    qkv_ptr, k_ptr, v_ptr, rows_ptr, pos_ptr, table_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr,
    T, start, S, WIDTH, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b, t = row // T, row % T
    place = start + t
    if PAGE:
        place = tl.load(pos_ptr + row)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    is_q, is_v = offs_h < HQ, (offs_h >= HQ + HKV) & (offs_h < HQ + 2 * HKV)
    is_k = (offs_h >= HQ) & (offs_h < HQ + HKV)
    partner = tl.where(offs_d < R // 2, offs_d + R // 2, tl.where(offs_d < R, offs_d - R // 2, offs_d))
    at = place.to(tl.int64) * R + offs_d
    cos = tl.load(cos_ptr + at, mask=offs_d < R, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=offs_d < R, other=0.0).to(tl.float32)
    sin = tl.where(offs_d < R // 2, -sin, sin)
    dtype = k_ptr.dtype.element_ty
    heads = qkv_ptr + row.to(tl.int64) * (HQ + 2 * HKV) * D + offs_h[:, None] * D
    mask_q = is_q[:, None] & mask_d[None, :]
    q = _heads(heads, q_norm_ptr, offs_d, partner, cos, sin, mask_q, mask_d, eps, D, NORM)
    tl.store(q_ptr + row.to(tl.int64) * HQ * D + offs_h[:, None] * D + offs_d[None, :], q.to(dtype), mask=mask_q)
    mask_k = is_k[:, None] & mask_d[None, :]
    k = _heads(heads, k_norm_ptr, offs_d, partner, cos, sin, mask_k, mask_d, eps, D, NORM)
    if PAGE:  # a block has S slots, and is found where a sequence's number stands otherwise
        b = tl.load(table_ptr + tl.load(rows_ptr + row) * WIDTH + place // PAGE)
        place = place % PAGE
    slot = place.to(tl.int64) * D + offs_d[None, :]
    tl.store(k_ptr + (b * HKV + offs_h - HQ).to(tl.int64)[:, None] * S * D + slot, k.to(dtype), mask=mask_k)
    mask_v = is_v[:, None] & mask_d[None, :]
    v = tl.load(heads + offs_d[None, :], mask=mask_v, other=0.0)
    tl.store(v_ptr + (b * HKV + offs_h - HQ - HKV).to(tl.int64)[:, None] * S * D + slot, v, mask=mask_v)


@triton.jit
def _block(
    q, k_head, v_head, table, S, n0, offs_n, offs_d, rows, end, window, scale, acc, top, total, page, k_scales, v_scales,
    of_head, q_sum, rest, cap, chunk, BLOCK_N: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr, PAGE: tl.constexpr,
    KV: tl.constexpr, NATIVE: tl.constexpr, CAPPED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """One block of keys. EDGE: some rows do not see all of it. rest: in 4 bits, the sum added to every column of acc."""
    slots = n0 + offs_n
    if KV:
        at, there = of_head + slots, slots < end
        if PAGE:
            at = of_head + page.to(tl.int64) * S + n0 % PAGE + offs_n
            page = tl.load(table + (n0 + BLOCK_N) // PAGE, mask=n0 + BLOCK_N < end, other=0)
        k = codes(k_head, at, there, offs_d, q.dtype, D, offs_d.shape[0], KV, NATIVE)
        v = codes(v_head, at, there, offs_d, q.dtype, D, offs_d.shape[0], KV, NATIVE)
        k_step, k_low = scales(k_scales, at, there, KV)
        v_step, v_low = scales(v_scales, at, there, KV)
    elif PAGE:  # blocks of keys lie in one block of the cache each; S: slots of all its key heads
        tile = (page.to(tl.int64) * S + n0 % PAGE) * D + (offs_n[:, None] * D + offs_d[None, :])
        # prefetch the next block index: a look-up at its use would cost k and v a pipeline stage
        page = tl.load(table + (n0 + BLOCK_N) // PAGE, mask=n0 + BLOCK_N < end, other=0)
    else:
        tile = slots.to(tl.int64)[:, None] * D + offs_d[None, :]
    if KV:
        pass
    elif EDGE:
        there = (slots < end)[:, None] & (offs_d < D)[None, :]
        k = tl.load(k_head + tile, mask=there, other=0.0)
        v = tl.load(v_head + tile, mask=there, other=0.0)
    elif offs_d.shape[0] == D:
        k = tl.load(k_head + tile)
        v = tl.load(v_head + tile)
    else:
        k = tl.load(k_head + tile, mask=(offs_d < D)[None, :], other=0.0)
        v = tl.load(v_head + tile, mask=(offs_d < D)[None, :], other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")  # fp32 in three parts of tf32 takes twice the shared memory
    if KV:
        score = score * k_step[None, :] + q_sum[:, None] * k_low[None, :]
    if CAPPED:
        score, scale = capped(score * scale, cap), 1.0
    elif EDGE:  # before the mask: the fused -1e30 * scale - higher of a row that sees none of this block can be 1e22, not 0
        score, scale = score * scale, 1.0
    if EDGE:
        seen = (slots[None, :] <= rows[:, None]) & (slots[None, :] > rows[:, None] - window)
        if CHUNKED:
            seen = seen & (slots[None, :] >= (rows // chunk * chunk)[:, None])
        score = tl.where(seen, score, -1.0e30)  # finite, so that a row that sees none of this block does not become NaN
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(p, 1)
    if KV:
        rest = rest * fade + tl.sum(p * v_low[None, :], 1)
        p = p * (v_step * UNIT)[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total, page, rest


@triton.jit(do_not_specialize=SIZES)
def _attend_prompt_kernel(
    k_ptr, v_ptr, rows_ptr, pos_ptr, table_ptr, tiles_ptr, sinks_ptr, y_ptr, k_scales, v_scales,
    T, start, S, WIDTH, window, scale, factor, cap, chunk,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, SINKS: tl.constexpr, KV: tl.constexpr, PART: tl.constexpr, NATIVE: tl.constexpr, CAPPED: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    b, h = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    if PAGE:  # tokens `first` to T of all of them, the first of which stands at slot start + first
        tile = tiles_ptr + 2 * (tl.num_programs(1) - 1 - tl.program_id(1))
        first, T = tl.load(tile), tl.load(tile + 1)
        if first >= T:
            return
        start = tl.load(pos_ptr + first) - first
        table = table_ptr + tl.load(rows_ptr + first) * WIDTH
    else:
        table = table_ptr
    offs_m, offs_n, offs_d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    mask = (offs_m < T)[:, None] & (offs_d < D)[None, :]
    at = y_ptr + (b.to(tl.int64) * T + offs_m)[:, None] * HQ * D + h * D
    dim = dims(offs_d, BLOCK_D, KV)
    q = tl.load(at + dim[None, :], mask=(offs_m < T)[:, None] & (dim < D)[None, :], other=0.0)  # written by `place`
    of_head = h // G * PAGE if PAGE else (b * (HQ // G) + h // G).to(tl.int64) * S
    k_head, v_head = (k_ptr, v_ptr) if KV else (k_ptr + of_head * D, v_ptr + of_head * D)
    q_sum, rest = tl.sum(q.to(tl.float32), 1), tl.zeros((BLOCK_M,), tl.float32)
    rows = start + offs_m
    low = tl.maximum(start + first + 1 - window, 0)  # the first slot that the first row sees
    left = tl.maximum(start + tl.minimum(first + BLOCK_M, T) - window, 0)  # the first that the last row sees
    if CHUNKED:
        low = tl.maximum(low, (start + first) // chunk * chunk)
        left = tl.maximum(left, (start + tl.minimum(first + BLOCK_M, T) - 1) // chunk * chunk)
    begin = low // BLOCK_N * BLOCK_N
    own = (start + first + 1) // BLOCK_N * BLOCK_N  # up to here every row sees every slot that its window has not left
    whole = tl.cdiv(left, BLOCK_N) * BLOCK_N  # none has been left
    whole = tl.minimum(tl.maximum(whole, begin), own)
    end = tl.minimum(start + first + BLOCK_M, start + T)
    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:  # one score more, without a value
        top, total = top * 0 + tl.load(sinks_ptr + h) * 1.4426950408889634, total + 1
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    page = 0
    if PAGE:
        page = tl.load(table + begin // PAGE)
    for part in tl.static_range(3):  # the slots that windows leave, those that every row sees, the rows' own
        low, high = begin, whole
        if part == 1:
            low, high = whole, own
        elif part == 2:
            low, high = own, end
        for n0 in range(low, high, BLOCK_N):
            acc, top, total, page, rest = _block(
                q, k_head, v_head, table, S, n0, offs_n, offs_d, rows, end, window, scale, acc, top, total, page,
                k_scales, v_scales, of_head, q_sum, rest, cap, chunk, BLOCK_N, D, EDGE=part != 1, PAGE=PAGE, KV=KV,
                NATIVE=NATIVE, CAPPED=CAPPED, CHUNKED=CHUNKED,
            )  # fmt: skip
    y = acc / total[:, None]
    if KV:
        y = held(y, rest / total, factor, offs_d, q.dtype, D, BLOCK_D, KV, PART)
    tl.store(at + offs_d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def attend_prompt(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    start: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    config: Config | None = None,
) -> torch.Tensor:
    """As `reference.attend_prompt`; qkv (B, T, (HQ + 2 HKV) * D) and caches (B, HKV, S, D) contiguous -> (B, T, HQ * D).

    config: the kernel's, instead of the one that dispatch chooses.
    """
    units = qkv.shape[0] * -(-(start + qkv.shape[1]) // reference.TILE)
    if _chosen(qkv, qkv.shape[0] * qkv.shape[1], k_cache, 0, h, (units, qkv.shape[0])) is None:
        return reference.attend_prompt(qkv, k_cache, v_cache, start, cos, sin, h)
    (B, T), S = qkv.shape[:2], k_cache.shape[2]
    return _launch(qkv.flatten(0, 1), k_cache, v_cache, None, cos, sin, h, (T, start, S, 0), (units, B), config).reshape(
        B, T, -1
    )


def attend_packed(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    p: Packed,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    config: Config | None = None,
) -> torch.Tensor:
    """As `reference.attend_packed`; qkv (M, (HQ + 2 HKV) * D), caches and what is in `p` contiguous -> (M, HQ * D).

    config: as in `attend_prompt`; its BLOCK_M is the size of p's tiles.
    """
    if _chosen(qkv, qkv.shape[0], k_cache, k_cache.shape[2], h, (p.units, p.sequences)) is None:
        return reference.attend_packed(qkv, k_cache, v_cache, p, cos, sin, h)
    sizes = (1 << 30, 0, k_cache.shape[2], p.table.shape[1])
    return _launch(qkv, k_cache, v_cache, p, cos, sin, h, sizes, (p.units, p.sequences), config)


def waits(dtype: torch.dtype, k_cache: Cache, h: Heads) -> bool:
    """Whether no kernel takes packed tokens of this dtype: `attend_packed` then waits for the device, and is not recorded."""
    return _chosen(numbers(k_cache).new_empty(0, dtype=dtype), 1, k_cache, k_cache.shape[2], h, (1, 1)) is None


def _chosen(qkv: torch.Tensor, M: int, k_cache: Cache, page: int, h: Heads, units: tuple[int, int]) -> Choice | None:
    """The kernel for M tokens, or None if no kernel takes them."""
    act: Act = "none" if h.window or h.sinks is not None else h.act
    call = PromptCall(M, h.D, page, kv.kind_of(k_cache), qkv.dtype, "cuda", capability(qkv.device), h.beyond, act, *units)
    if qkv.is_cuda:
        return find(call)
    spec = named("triton/prompt")  # also in Triton's interpreter
    return None if spec.why_not(call) else (spec, {})


def _launch(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    p: Packed | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    sizes: Sizes,
    units: tuple[int, int],
    config: Config | None,
) -> torch.Tensor:
    """Launches both kernels over qkv (M, ...)."""
    M, (T, start, S, _) = qkv.shape[0], sizes
    y = torch.empty(M, h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    page = 0 if p is None else S
    if isinstance(k_cache, Coded) and isinstance(v_cache, Coded):
        of_place = (None, None, None) if p is None else (p.pos, p.rows, p.table)
        place(qkv, k_cache, v_cache, cos, sin, h, y, start, T, *of_place)
    else:
        of_tokens = (None, None, None) if p is None else (p.rows, p.pos, p.table)
        HKV = h.HKV if h.writes else 0
        norms = (h.q_norm, h.q_norm if h.k_norm is None else h.k_norm)
        tensors = (qkv, k_cache, v_cache, *of_tokens, cos, sin, *norms, y)
        shape = {"HQ": h.HQ, "HKV": HKV, "D": h.D, "R": cos.shape[1], "NORM": h.q_norm is not None, "PAGE": page}
        grid = (M, triton.cdiv(h.HQ + 2 * HKV, HEADS_AT_ONCE))
        _place_kernel[grid](*tensors, *sizes, h.eps, **shape, BLOCK_H=HEADS_AT_ONCE, BLOCK_D=padded(h.D), num_warps=4)
    chosen = _chosen(qkv, M, k_cache, page, h, units)
    assert chosen
    spec, by_dispatch = chosen
    return spec.launch(y, k_cache, v_cache, p, h, sizes, config or by_dispatch)


def _refuse(call: PromptCall) -> str | None:
    """Why the kernel does not take a call, or None."""
    fits = call.dtype != torch.float32 or call.D <= FP32_MOST
    return refuse(call) if fits else f"takes heads of up to {FP32_MOST} in float32, not D={call.D}"


@register("triton/prompt", op="prompt", dtypes=(torch.float16, torch.bfloat16, torch.float32), rank=40, refuse=_refuse)
def attend(
    y: torch.Tensor, k_cache: Cache, v_cache: Cache, p: Packed | None, h: Heads, sizes: Sizes, config: Config
) -> torch.Tensor:
    """See `PromptCall`."""
    T, start, S, width = sizes
    facts = {"HQ": h.HQ, "D": h.D, "BLOCK_D": padded(h.D), "PAGE": 0 if p is None else S}
    of_tokens = (None, None, None, None) if p is None else (p.rows, p.pos, p.table, p.tiles)
    tuned = CONFIG if h.D <= 128 else WIDE if h.D <= 256 else WIDEST
    tuned = config or (tuned | FP32 if y.dtype == torch.float32 else tuned)
    grid = (y.shape[0] // T * h.HQ, triton.cdiv(T, tuned["BLOCK_M"])) if p is None else (h.HQ, p.tiles.shape[0])
    longest = start + T if p is None else S * width
    if p is not None:  # a block of keys lies in one block of the cache; S: its slots, of all key heads
        tuned, S = {**tuned, "BLOCK_N": min(tuned["BLOCK_N"], S)}, S * h.HKV
    pointers = (numbers(k_cache), numbers(v_cache), *of_tokens, h.sinks, y, raw(k_cache), raw(v_cache))
    of_layer = (h.window or longest, score_factor(h), kv.part_of(h.D) ** -0.5, h.softcap * LOG2E, h.chunk)
    facts |= {"G": h.HQ // h.HKV, "SINKS": h.sinks is not None, **facts_of(k_cache)}
    facts |= {"CAPPED": h.softcap != 0.0, "CHUNKED": h.chunk != 0}
    _attend_prompt_kernel[grid](*pointers, T, start, S, width, *of_layer, **facts, **tuned)
    return y
