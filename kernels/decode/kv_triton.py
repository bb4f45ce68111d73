"""Caches in few bits for Triton's attention kernels: writing heads, and decoding tiles (`kv` defines the encodings).

    place  (tokens, heads in blocks): q/k norm and RoPE; q, transformed, goes to a buffer, keys and values into the cache
    codes  a tile of codes as numbers of the queries' dtype, in registers. A scale belongs to a slot, so it multiplies the
           products (score * scale, p * scale) and no number is multiplied by it

A kernel's KV is 0 for 16 bits, 8 for fp8, 4 for 4 bits. In 4 bits the columns of a tile are the even dims, then the odd ones
(`dims`), so that the bytes of a row are read in memory order.
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode import kv
from lowq_kernels.decode.kv import Cache, Coded
from lowq_kernels.decode.reference import Heads
from lowq_kernels.gpu import capability, since
from lowq_kernels.rounding_triton import to_bf16

NUMBERS = {"16": 0, "fp8": 8, "4": 4}
HEADS_AT_ONCE = 16  # rows per matrix product
CONVERTS = since(lambda on: on.fp8)  # GPUs whose tensor cores take e4m3 also have an instruction that converts it
TRIES: tl.constexpr = tl.constexpr(kv.TRIES)
FIRST: tl.constexpr = tl.constexpr(kv.FIRST)
UNIT: tl.constexpr = tl.constexpr(256.0)  # of p * step, which fp16 would not hold otherwise where values are small
SHORTER: tl.constexpr = tl.constexpr(kv.SHORTER)


@triton.jit
def dims(offs_d, BLOCK_D: tl.constexpr, KV: tl.constexpr):
    """The dim of each column of a tile."""
    dim = offs_d
    if KV == 4:
        dim = offs_d % (BLOCK_D // 2) * 2 + offs_d // (BLOCK_D // 2)
    return dim


@triton.jit
def signs(of_rows, of_columns, D: tl.constexpr, PART: tl.constexpr):
    """The Hadamard matrix without its factor, in fp32, from dims of rows to dims of columns; 0 between parts and past D."""
    both = of_rows[:, None] & of_columns[None, :] & (PART - 1)
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = (both ^ (both >> 1) ^ (both >> 8 if PART >= 256 else 0)) & 1
    alike = (of_rows[:, None] // PART == of_columns[None, :] // PART) & (of_rows < D)[:, None] & (of_columns < D)[None, :]
    return tl.where(alike, 1.0 - 2.0 * both.to(tl.float32), 0.0)


@triton.jit
def _e4m3(x):
    """The bits of e4m3 nearest to x of at most 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2^-9, as fp32 rounds them there
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _of_e4m3(codes):
    """The fp32 numbers of bits of e4m3, int32."""
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the exponents' difference


@triton.jit
def codes(
    codes_ptr, rows, there, offs_d, dtype, D: tl.constexpr, BLOCK_D: tl.constexpr, KV: tl.constexpr, NATIVE: tl.constexpr
):
    """Codes of `rows` (n,) of the cache as numbers (n, BLOCK_D); of 4 bits less 8, so that their mean is near 0."""
    if KV == 8:
        at = codes_ptr + rows[:, None] * D + offs_d[None, :]
        c = tl.load(at, mask=there[:, None] & (offs_d < D)[None, :], other=0)
        x = c.to(tl.float8e4nv, bitcast=True).to(dtype) if NATIVE else _of_e4m3(c.to(tl.int32)).to(dtype)
    else:
        byte = offs_d % (BLOCK_D // 2)
        at = codes_ptr + rows[:, None] * (D // 2) + byte[None, :]
        c = tl.load(at, mask=there[:, None] & (byte < D // 2)[None, :], other=0).to(tl.int32)
        x = (((c >> (offs_d // (BLOCK_D // 2) * 4)[None, :]) & 15) - 8).to(dtype)
    return x


@triton.jit
def scales(scales_ptr, rows, there, KV: tl.constexpr):
    """For each of `rows`: the factor of its codes, and the number added to each value (0 in fp8)."""
    raw = tl.load(scales_ptr + rows, mask=there, other=0).to(tl.int32)
    if KV == 8:
        step = ((raw + FIRST) << 20).to(tl.float32, bitcast=True)
        low = tl.zeros_like(step)
    else:
        step = (raw << 16).to(tl.float32, bitcast=True)
        low = (raw & -65536).to(tl.float32, bitcast=True) + 8.0 * step
    return step, low


@triton.jit
def held(y, rest, factor, offs_d, dtype, D: tl.constexpr, BLOCK_D: tl.constexpr, KV: tl.constexpr, PART: tl.constexpr):
    """Sums of values from y (rows, BLOCK_D), of numbers times p * step * UNIT, and rest (rows,), of p * low; turned back."""
    turn = signs(dims(offs_d, BLOCK_D, KV), offs_d, D, PART).to(dtype)
    return tl.dot((y * (1.0 / UNIT) + rest[:, None]).to(dtype), turn, input_precision="ieee") * factor


@triton.jit
def _encode(x, mask_d, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KV: tl.constexpr):
    """Encodes transformed rows x (BLOCK_H, BLOCK_D) fp32: bytes (BLOCK_H, BLOCK_D or BLOCK_D / 2), raw scales (BLOCK_H,)."""
    inside = mask_d[None, :]
    high = tl.max(tl.where(inside, x, float("-inf")), 1)
    low = tl.min(tl.where(inside, x, float("inf")), 1)
    least = tl.full((BLOCK_H,), float("inf"), tl.float32)
    raw = tl.zeros((BLOCK_H,), tl.int32)
    best = tl.zeros((BLOCK_H, BLOCK_D), tl.int32)
    first = (((tl.maximum(high, -low) / 448.0).to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - FIRST
    for i in tl.static_range(TRIES):
        if KV == 8:
            its = tl.minimum(tl.maximum(first + i, 0), 255)
            step = ((its + FIRST) << 20).to(tl.float32, bitcast=True)
            c = _e4m3(tl.minimum(tl.maximum(x * (1.0 / step)[:, None], -448.0), 448.0))
            held = _of_e4m3(c) * step[:, None]
        else:
            reach = (high - low) * 0.5 * (1.0 - SHORTER * i)
            step, base = to_bf16(reach * (2.0 / 15.0)), to_bf16((low + high) * 0.5 - reach)
            by = tl.where(step > 0.0, 1.0 / step, 0.0)
            c = tl.floor(tl.minimum(tl.maximum((x - base[:, None]) * by[:, None], 0.0), 15.0) + 0.5).to(tl.int32)
            held = c.to(tl.float32) * step[:, None] + base[:, None]
            its = ((step.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | base.to(tl.int32, bitcast=True)
        off = tl.where(inside, held - x, 0.0)
        error = tl.sum(off * off, 1)
        better = error < least
        best = tl.where(better[:, None], c, best)
        raw, least = tl.where(better, its, raw), tl.where(better, error, least)
    if KV == 4:
        even, odd = tl.split(tl.reshape(best, (BLOCK_H, BLOCK_D // 2, 2)))
        best = even | (odd << 4)
    return best, raw


@triton.jit(do_not_specialize=["T", "start", "S", "WIDTH"])
def _place_kernel(
    qkv_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, rows_ptr, pos_ptr, table_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    q_ptr, T, start, S, WIDTH, eps, factor,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PART: tl.constexpr, PAGED: tl.constexpr, EACH: tl.constexpr, NORM: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    b, place = row // T, start + row % T
    if EACH:  # each token's position is read from memory
        place = tl.load(pos_ptr + row)
    offs_h, offs_d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    partner = tl.where(offs_d < R // 2, offs_d + R // 2, tl.where(offs_d < R, offs_d - R // 2, offs_d))
    turns = (offs_h < HQ + HKV)[:, None] & (offs_d < R)[None, :]
    at = place.to(tl.int64) * R + offs_d
    cos = tl.load(cos_ptr + at, mask=offs_d < R, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + at, mask=offs_d < R, other=0.0).to(tl.float32)[None, :]
    heads = qkv_ptr + row.to(tl.int64) * (HQ + 2 * HKV) * D + offs_h[:, None] * D
    mask = (offs_h < HQ + 2 * HKV)[:, None] & mask_d[None, :]
    x = tl.load(heads + offs_d[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    other = tl.load(heads + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    is_q, is_v = offs_h < HQ, offs_h >= HQ + HKV
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        for which in tl.static_range(2):
            norm_ptr, mine = (q_norm_ptr, is_q[:, None]) if which == 0 else (k_norm_ptr, (~is_q & ~is_v)[:, None])
            x = tl.where(mine, x * inverse * tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :], x)
            its = tl.load(norm_ptr + partner, mask=mask_d, other=0.0).to(tl.float32)[None, :]
            other = tl.where(mine, other * inverse * its, other)
    x = tl.where(turns, x * cos + other * tl.where(offs_d < R // 2, -sin, sin), x).to(dtype)
    x = tl.dot(x, signs(offs_d, offs_d, D, PART).to(dtype), input_precision="ieee") * factor
    to_q = q_ptr + row.to(tl.int64) * HQ * D + offs_h[:, None] * D + offs_d[None, :]
    tl.store(to_q, x.to(dtype), mask=is_q[:, None] & mask_d[None, :])
    bytes_, raw = _encode(x.to(tl.float32), mask_d, BLOCK_H, BLOCK_D, KV)
    if PAGED:  # a block has S slots, and is found where a sequence's number stands otherwise
        of = row if not PAGED - 1 else tl.load(rows_ptr + row)
        b = tl.load(table_ptr + of * WIDTH + place // S)
        place = place % S
    WIDE: tl.constexpr = D if KV == 8 else D // 2
    offs_b = tl.arange(0, BLOCK_D if KV == 8 else BLOCK_D // 2)
    raw = raw.to(k_scales_ptr.dtype.element_ty)
    for which in tl.static_range(2):
        key = offs_h - HQ - which * HKV
        here, mine = (b.to(tl.int64) * HKV + key) * S + place, (key >= 0) & (key < HKV)
        codes_ptr, beside = (k_ptr, k_scales_ptr) if which == 0 else (v_ptr, v_scales_ptr)
        tl.store(
            codes_ptr + here[:, None] * WIDE + offs_b[None, :],
            bytes_.to(tl.uint8),
            mask=mine[:, None] & (offs_b < WIDE)[None, :],
        )
        tl.store(beside + here, raw, mask=mine)


def padded(D: int) -> int:
    """The padded dims of a head of D: a size that `tl.dot` takes."""
    return max(16, triton.next_power_of_2(D))


def raw(held: Cache) -> torch.Tensor | None:
    """The scales of a cache as kernels read them, one number per slot; None in 16 bits."""
    if not isinstance(held, Coded):
        return None
    return held.scales if held.kind == "fp8" else held.scales.view(torch.int32)


def numbers(held: Cache) -> torch.Tensor:
    """The tensor that a kernel reads a cache's values from."""
    return held.codes if isinstance(held, Coded) else held


def facts(held: Cache) -> dict[str, int | bool]:
    """The compile-time constants of a kernel by name."""
    device, D = held.device, held.shape[3]
    native = device.type == "cuda" and capability(device) >= CONVERTS
    return {"KV": NUMBERS[kv.kind_of(held)], "PART": kv.part_of(D), "NATIVE": native}


def place(
    qkv: torch.Tensor,
    k_cache: Coded,
    v_cache: Coded,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    q: torch.Tensor,
    start: int = 0,
    each: int = 1,
    pos: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """Write keys and values of qkv (M, (HQ + 2 HKV) * D) into the cache, and queries to q (M, HQ * D), turned; those alone of
    layers without keys of their own.

    Token m stands at slot start + m % each of sequence m // each; with `pos` (M,) at pos[m], with a table in the blocks of its
    row m, or rows[m].
    """
    HKV, encoding = h.HKV if h.writes else 0, facts(k_cache)
    encoding.pop("NATIVE")
    _place_kernel[(qkv.shape[0], triton.cdiv(h.HQ + 2 * HKV, HEADS_AT_ONCE))](
        qkv, k_cache.codes, v_cache.codes, raw(k_cache), raw(v_cache), rows, pos, table, cos, sin, h.q_norm,
        h.q_norm if h.k_norm is None else h.k_norm, q,
        each, start, k_cache.shape[2], 0 if table is None else table.shape[1], h.eps, kv.part_of(h.D) ** -0.5,
        HQ=h.HQ, HKV=HKV, D=h.D, R=cos.shape[1], BLOCK_H=HEADS_AT_ONCE, BLOCK_D=padded(h.D),
        PAGED=0 if table is None else 1 if rows is None else 2, EACH=pos is not None, NORM=h.q_norm is not None, **encoding,
        num_warps=4,
    )  # fmt: skip
