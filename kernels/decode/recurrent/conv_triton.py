"""The convolution of recurrent mixers over a channel's last W inputs: one token of each of many sequences, or runs of tokens.

Grid    step  (sequences, channels in blocks): a channel's inputs move on by one in its state
        rows  (sequences, channels in blocks): several rows of a sequence at once; the inputs that a channel has after each of
              them go to a place of its own
        run   (tiles of tokens in parts, heads or channels in blocks): inputs before a run come from its state. Keys and queries
              of gated delta are brought to length 1 in the same program, a head each
        after (runs, channels in blocks): the last inputs of each run become its state, when all tiles have read it
Source  own
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.launch import launch_next, overlap, pdl, wait
from lowq_kernels.decode.recurrent import CHUNK, Rows, Runs, States
from lowq_kernels.decode.recurrent.delta import EPS

# Channels times rows of a sequence per program of a step; channels per program of the kernel that updates states after a run.
CHANNELS = 256
RUN_CHANNELS, RUN_ROWS = 128, 16  # channels (of a mixer without heads) and tokens per program of a run
PLAIN, GROUPED, SHORT = 0, 1, 2  # modes: the place of a channel's input in a row of x, and the use of the output
LENGTHS: tl.constexpr = tl.constexpr(EPS)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.where(x > 20.0, 0.0, x))))


@triton.jit
def place(own, copies_ptr, sequence, t, ROWS: tl.constexpr):
    """The slot of a sequence's state after row t of ROWS: its own after the last, a copy's after the others."""
    if ROWS > 1:
        own = tl.where(t < ROWS - 1, tl.load(copies_ptr + sequence * (ROWS - 1) + tl.minimum(t, ROWS - 2)), own)
    return own


@triton.jit
def channels(token, c, mask, first, C, k_heads, k_dim, v_dim, each, MODE: tl.constexpr):
    """The convolution's inputs for channels c of row `token` of x, not rounded. MODE 0: channel c is at column first + c."""
    if MODE == 1:
        keys = k_heads * k_dim
        of = c % keys
        key = (of // k_dim) * (2 * k_dim + 2 * each * v_dim) + of % k_dim + tl.where(c < keys, 0, k_dim)
        value = c - 2 * keys
        head = value // v_dim
        at = (head // each) * (2 * k_dim + 2 * each * v_dim) + 2 * k_dim + (head % each) * v_dim + value % v_dim
        new = tl.load(token + tl.where(c < 2 * keys, key, at), mask=mask, other=0.0)
    elif MODE == 2:
        u = tl.load(token + 2 * C + c, mask=mask, other=0.0).to(tl.float32)
        new = tl.load(token + c, mask=mask, other=0.0).to(tl.float32) * u
    else:
        new = tl.load(token + first + c, mask=mask, other=0.0)
    return new


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, slots_ptr, y_ptr, wide, first, C, k_heads, k_dim, v_dim, each,
    end_x, end_b, by_x, by_b, by_c,
    MODE: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """MODE 0: channel c is at column first + c of x. SCALED: weights are multiplied by a constant per part of the channels."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, w = c < C, tl.arange(0, BLOCK_W)
    launch_next(TRIGGER)
    own = tl.load(slots_ptr + row)
    by = 1.0
    if SCALED:
        by = tl.where(c < end_x, by_x, tl.where(c < end_b, by_b, by_c))
    if W > 1:
        state = state_ptr + own * C * (W - 1) + (c * (W - 1))[:, None] + w[None, :]
        mask_w = mask[:, None] & (w < W - 1)[None, :]
        held = tl.load(state, mask=mask_w, other=0.0)
        moved = tl.load(state + 1, mask=mask[:, None] & (w < W - 2)[None, :], other=0.0)
        taps = tl.load(weight_ptr + (c * W)[:, None] + w[None, :], mask=mask_w, other=0.0).to(tl.float32)
    wait(PDL)
    token = x_ptr + row * wide
    new = channels(token, c, mask, first, C, k_heads, k_dim, v_dim, each, MODE)
    new = new.to(state_ptr.dtype.element_ty)
    acc = new.to(tl.float32) * (tl.load(weight_ptr + c * W + W - 1, mask=mask, other=0.0).to(tl.float32) * by)
    if W > 1:
        acc += tl.sum(held.to(tl.float32) * taps, 1) * by
        moved = tl.where((w == W - 2)[None, :], new[:, None], moved)
        tl.debug_barrier()  # every thread has read before one of them writes
        tl.store(state, moved, mask=mask_w)
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    acc = acc * tl.load(token + C + c, mask=mask, other=0.0).to(tl.float32) if MODE == 2 else silu(acc)
    tl.store(y_ptr + row * C + c, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _held(state, t, c, mask, W: tl.constexpr):
    """The inputs of channels c at rows t before a sequence's first, from its state."""
    return tl.load(state + c * (W - 1) + t + W - 1, mask=mask & (t < 0), other=0.0)


@triton.jit
def _inputs(held, x_ptr, t, c, mask, wide, first, C, k_heads, k_dim, v_dim, each, MODE: tl.constexpr):
    """The inputs of channels c at rows t of a sequence, rounded as in the state."""
    new = channels(x_ptr + t.to(tl.int64) * wide, c, mask & (t >= 0), first, C, k_heads, k_dim, v_dim, each, MODE)
    return tl.where(t < 0, held, new.to(held.dtype))


@triton.jit
def _conv_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, slots_ptr, copies_ptr, y_ptr, wide, first, C, k_heads, k_dim, v_dim, each,
    end_x, end_b, by_x, by_b, by_c, scale,
    MODE: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """As `_conv_kernel`, tensors of (rows, channels, inputs). HEADS: a block is a head; queries and keys get length 1."""
    sequence, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t, w = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_W)
    launch_next(TRIGGER)
    own = tl.load(slots_ptr + sequence)
    by = 1.0
    if SCALED:
        by = tl.where(c < end_x, by_x, tl.where(c < end_b, by_b, by_c))[None, :]
    rows, these, mask = t[:, None], c[None, :], (t < ROWS)[:, None] & (c < C)[None, :]
    weights = weight_ptr + these * W
    last = tl.load(weights + W - 1, mask=these < C, other=0.0).to(tl.float32) * by
    if W > 1:
        at, all_w = rows[:, :, None] + w[None, None, :] - (W - 1), these[:, :, None]
        mask_w = mask[:, :, None] & (w < W - 1)[None, None, :]
        state = state_ptr + own * C * (W - 1)
        held, held_next = _held(state, at, all_w, mask_w, W), _held(state, at + 1, all_w, mask_w, W)
        taps = tl.load(weights[:, :, None] + w[None, None, :], mask=(these < C)[:, :, None] & (w < W - 1), other=0.0)
        taps = taps.to(tl.float32)
        places = place(own, copies_ptr, sequence, t, ROWS)[:, None, None] * C * (W - 1)
    wait(PDL)
    x_ptr += sequence * ROWS * wide
    new = channels(x_ptr + rows.to(tl.int64) * wide, these, mask, first, C, k_heads, k_dim, v_dim, each, MODE)
    acc = new.to(state_ptr.dtype.element_ty).to(tl.float32) * last
    if W > 1:
        moved = _inputs(held_next, x_ptr, at + 1, all_w, mask_w, wide, first, C, k_heads, k_dim, v_dim, each, MODE)
        held = _inputs(held, x_ptr, at, all_w, mask_w, wide, first, C, k_heads, k_dim, v_dim, each, MODE)
        acc += tl.sum(held.to(tl.float32) * taps, 2) * by
        tl.debug_barrier()  # every thread has read before one of them writes
        tl.store(state_ptr + places + all_w * (W - 1) + w[None, None, :], moved, mask=mask_w)
    if BIAS:
        acc += tl.load(bias_ptr + these, mask=these < C, other=0.0).to(tl.float32)
    token = x_ptr + rows.to(tl.int64) * wide + C + these
    acc = acc * tl.load(token, mask=mask, other=0.0).to(tl.float32) if MODE == 2 else silu(acc)
    if HEADS:
        unit = tl.program_id(1)
        to_length = tl.rsqrt(tl.sum(acc * acc, 1) + LENGTHS) * tl.where(unit < k_heads, scale, 1.0)
        acc = acc * tl.where(unit < 2 * k_heads, to_length, 1.0)[:, None]
    tl.store(y_ptr + (sequence * ROWS + rows) * C + these, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _conv_run_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, tiles_ptr, y_ptr, wide, first, C, k_heads, k_dim, v_dim, each,
    end_x, end_b, by_x, by_b, by_c, scale,
    MODE: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """HEADS: a program has a head of q, k or v, else a block of channels. Tiles: `Runs`."""
    tile, unit, offs = tiles_ptr + 4 * (tl.program_id(0) // PARTS), tl.program_id(1), tl.arange(0, BLOCK)
    c, mask_c = unit * BLOCK + offs, unit * BLOCK + offs < C
    if HEADS:
        is_key = unit < 2 * k_heads
        c = tl.where(is_key, unit * k_dim, 2 * k_heads * k_dim + (unit - 2 * k_heads) * v_dim) + offs
        mask_c = offs < tl.where(is_key, k_dim, v_dim)
    launch_next(TRIGGER)
    by = 1.0
    if SCALED:
        by = tl.where(c < end_x, by_x, tl.where(c < end_b, by_b, by_c))
    wait(PDL)
    begin, end, run = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if begin + tl.program_id(0) % PARTS * ROWS >= end:
        return
    rows = begin + tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    there = rows < end
    mask = there[:, None] & mask_c[None, :]
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.static_range(W):
        at = rows - (W - 1) + i
        token = x_ptr + at.to(tl.int64)[:, None] * wide
        new = channels(token, c[None, :], mask & (at >= run)[:, None], first, C, k_heads, k_dim, v_dim, each, MODE)
        tap = (tl.load(weight_ptr + c * W + i, mask=mask_c, other=0.0).to(tl.float32) * by)[None, :]
        acc += new.to(state_ptr.dtype.element_ty).to(tl.float32) * tap
    if tl.program_id(0) % PARTS * ROWS + begin < run + W - 1:  # inputs before the run, which the state holds
        state = state_ptr + tl.load(tile + 3).to(tl.int64) * C * (W - 1) + c * (W - 1)
        for i in tl.static_range(W - 1):
            before = mask & (rows - (W - 1) + i < run)[:, None]
            held = tl.load(state[None, :] + (rows - run + i)[:, None], mask=before, other=0.0)
            tap = (tl.load(weight_ptr + c * W + i, mask=mask_c, other=0.0).to(tl.float32) * by)[None, :]
            acc += held.to(tl.float32) * tap
    if BIAS:
        acc += tl.load(bias_ptr + c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None]
    acc = acc * tl.load(x_ptr + at * wide + C + c[None, :], mask=mask, other=0.0).to(tl.float32) if MODE == 2 else silu(acc)
    if HEADS:
        to_length = tl.rsqrt(tl.sum(acc * acc, 1) + LENGTHS) * tl.where(unit < k_heads, scale, 1.0)
        acc = acc * tl.where(is_key, to_length, 1.0)[:, None]
    tl.store(y_ptr + at * C + c[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _conv_after_kernel(
    x_ptr, state_ptr, runs_ptr, wide, first, C, k_heads, k_dim, v_dim, each,
    MODE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    run, c, w = runs_ptr + 4 * tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    overlap(PDL, TRIGGER)
    begin, end = tl.load(run), tl.load(run + 1)
    mask = (c < C)[:, None] & (w < W - 1)[None, :] & (begin < end)
    state = state_ptr + tl.load(run + 3).to(tl.int64) * C * (W - 1) + (c * (W - 1))[:, None]
    at = end - (W - 1) + w
    held = tl.load(state + (w + end - begin)[None, :], mask=mask & (at < begin)[None, :], other=0.0)
    token = x_ptr + at.to(tl.int64)[None, :] * wide
    new = channels(token, c[:, None], mask & (at >= begin)[None, :], first, C, k_heads, k_dim, v_dim, each, MODE)
    new = tl.where((at < begin)[None, :], held, new.to(state_ptr.dtype.element_ty))
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(state + w[None, :], new, mask=mask)


@dataclass(frozen=True)
class Conv:
    """The parameters of one mixer's convolution for the kernels."""

    mode: int = PLAIN
    first: int = 0
    grouped: tuple[int, int, int, int] = (1, 1, 1, 1)  # k_heads, k_dim, v_dim, v heads of a key head
    ends: tuple[int, int] = (0, 0)
    by: tuple[float, float, float] = (1.0, 1.0, 1.0)
    scale: float = 0.0  # of runs and rows: factor of queries, which have length 1; 0: lengths stay as they are


def parted(x: torch.Tensor, places: torch.Tensor | Rows) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Slots of sequences, those of copies, and rows of x that each sequence has."""
    return (places, None, 1) if isinstance(places, torch.Tensor) else (places.slot, places.copies, x.shape[0])


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: States, places: torch.Tensor | Rows,
    y: torch.Tensor, how: Conv,
) -> None:  # fmt: skip
    """A token of each sequence, or rows of one: x (M, N) -> y (M, C)."""
    (C, W), (slots, copies, rows) = weight.shape, parted(x, places)
    BLOCK_T = triton.next_power_of_2(rows)
    heads = how.scale != 0.0
    BLOCK = how.grouped[1] if heads else min(max(32, CHANNELS // BLOCK_T), triton.next_power_of_2(C))
    facts = {"MODE": how.mode, "W": W, "BIAS": bias is not None, "SCALED": how.by != (1.0, 1.0, 1.0), "BLOCK": BLOCK}
    facts |= {"BLOCK_W": triton.next_power_of_2(max(W - 1, 1)), "num_warps": 4, **pdl(x)}
    grid, sizes = (x.shape[0] // rows, triton.cdiv(C, BLOCK)), (x.shape[1], how.first, C, *how.grouped, *how.ends, *how.by)
    if rows == 1:
        _conv_kernel[grid](x, weight, bias, states["conv"], slots, y, *sizes, **facts)
    else:
        _conv_rows_kernel[grid](
            x, weight, bias, states["conv"], slots, copies, y, *sizes, how.scale, HEADS=heads, ROWS=rows, BLOCK_T=BLOCK_T,
            **facts,
        )  # fmt: skip


def convolved_runs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: States, runs: Runs, y: torch.Tensor, how: Conv
) -> None:
    """The tokens of runs: x (M, N) -> y (M, C)."""
    (C, W), (k_heads, k_dim, v_dim, each) = weight.shape, how.grouped
    heads = how.scale != 0.0
    BLOCK = triton.next_power_of_2(max(k_dim, v_dim)) if heads else min(RUN_CHANNELS, triton.next_power_of_2(C))
    units = k_heads * (2 + each) if heads else triton.cdiv(C, BLOCK)
    parts = CHUNK // RUN_ROWS
    _conv_run_kernel[(runs.tiles.shape[0] * parts, units)](
        x, weight, bias, states["conv"], runs.tiles, y, x.shape[1], how.first, C, *how.grouped, *how.ends, *how.by, how.scale,
        MODE=how.mode, W=W, BIAS=bias is not None, SCALED=how.by != (1.0, 1.0, 1.0), HEADS=heads, BLOCK=BLOCK,
        ROWS=RUN_ROWS, PARTS=parts, num_warps=4, **pdl(x),
    )  # fmt: skip
    if W > 1:
        BLOCK = min(CHANNELS, triton.next_power_of_2(C))
        _conv_after_kernel[(runs.table.shape[0], triton.cdiv(C, BLOCK))](
            x, states["conv"], runs.table, x.shape[1], how.first, C, *how.grouped, MODE=how.mode, W=W, BLOCK=BLOCK,
            BLOCK_W=triton.next_power_of_2(W - 1), num_warps=4, **pdl(x),
        )  # fmt: skip
