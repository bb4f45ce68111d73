"""grouped_experts: a mixture layer for any number of tokens; it never waits for the device, so CUDA graphs can capture it.

    sort            finds the row of each slot (token, expert) among rows sorted by expert, each expert padded to whole tiles,
                    and copies x there; for more slots than MOST_SORTED, count, place and gather do the same
    two products    cuda/tile_wgmma, grouped; between them act(gate) * up, or act(up)
    weigh           sums each token's slots in fp32
The order of an expert's rows does not matter: a row's sums do not depend on its neighbours.
"""

# mypy: allow-untyped-defs

import math

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.decode.elementwise import activated, gated
from lowq_kernels.decode.launch import overlap, pdl, wait
from lowq_kernels.decode.mixture import ExpertsCall, many_slots
from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.modules.stack import Stack
from lowq_kernels.products.cuda import tile_wgmma_grouped

ACTS = ("silu", "gelu_tanh", "clamped_swiglu", *(UNGATED + act for act in ("relu2", "silu", "gelu", "gelu_tanh", "relu")))
BLOCK = 256  # slots or features per program
# Max. slots that `sort` takes: each of its programs, one for each slot, reads all ids. A3B's layer of 128, 512, 1,024 and 2,048
# slots takes 71.7, 102.9, 107.5 and 133.4 us, and 73.8, 108.6, 111.5 and 129.9 by count, place and gather.
MOST_SORTED = 1024


@triton.jit
def _sort_kernel(
    ids_ptr, x_ptr, rows_ptr, experts_ptr, valid_ptr, sorted_ptr, slots, tiles, H,
    E: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    slot, at, e = tl.program_id(0), tl.arange(0, SLOTS), tl.arange(0, BINS)
    wait(PDL)
    ids = tl.load(ids_ptr + at, mask=at < slots, other=E).to(tl.int32)  # past the last: a bin that is no expert's
    whole = tl.where(e < E, (tl.histogram(ids, BINS) + ROWS - 1) // ROWS, 0)  # tiles of each expert
    expert = tl.load(ids_ptr + slot).to(tl.int32)
    rank = tl.sum(((ids == expert) & (at < slot)).to(tl.int32), 0)
    row = tl.sum(tl.where(e < expert, whole, 0), 0) * ROWS + rank
    tl.store(rows_ptr + slot, row)
    if slot < tiles:  # also the expert of a tile
        owner = tl.sum(((tl.cumsum(whole, 0) <= slot) & (e < E)).to(tl.int32), 0)
        tl.store(experts_ptr + slot, tl.minimum(owner, E - 1))
    if slot == 0:
        tl.store(valid_ptr, tl.sum(whole, 0) * ROWS)
    given, taken = x_ptr + (slot // TOP_K).to(tl.int64) * H, sorted_ptr + row.to(tl.int64) * H
    for first in range(0, H, BLOCK):
        k = first + tl.arange(0, BLOCK)
        tl.store(taken + k, tl.load(given + k, mask=k < H), mask=k < H)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, ranks_ptr, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < slots
    expert = tl.load(ids_ptr + at, mask=here, other=0)
    tl.store(ranks_ptr + at, tl.atomic_add(counts_ptr + expert, 1, mask=here), mask=here)


@triton.jit
def _place_kernel(
    ids_ptr, counts_ptr, ranks_ptr, rows_ptr, tokens_ptr, experts_ptr, valid_ptr, slots, tiles,
    E: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    whole = (tl.load(counts_ptr + e, mask=e < E, other=0) + ROWS - 1) // ROWS
    ends = tl.cumsum(whole, 0)  # in tiles
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < slots
    expert = tl.load(ids_ptr + at, mask=here, other=0).to(tl.int32)
    before = tl.sum(tl.where(e[None, :] < expert[:, None], whole[None, :], 0), 1)
    row = before * ROWS + tl.load(ranks_ptr + at, mask=here, other=0)
    tl.store(rows_ptr + at, row, mask=here)
    tl.store(tokens_ptr + row, at // TOP_K + 1, mask=here)
    owner = tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1)
    tl.store(experts_ptr + at, tl.minimum(owner, E - 1), mask=at < tiles)
    if tl.program_id(0) == 0:
        tl.store(valid_ptr, tl.sum(whole, 0) * ROWS)


@triton.jit
def _gather_kernel(x_ptr, tokens_ptr, y_ptr, H, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    if token > 0:
        for first in range(0, H, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(y_ptr + row * H + at, tl.load(x_ptr + (token - 1) * H + at, mask=at < H), mask=at < H)


@triton.jit
def _weigh_kernel(
    y_ptr, rows_ptr, weights_ptr, out_ptr, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    overlap(PDL, TRIGGER)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + k)
        total += weight * tl.load(y_ptr + row * H + at, mask=at < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + at, total.to(out_ptr.dtype.element_ty), mask=at < H)


def sort(x: torch.Tensor, ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, ...]:
    """(x in the rows of its slots (P, H), the others unwritten; and the first, third and fourth of `place`)."""
    slots, H = ids.numel(), x.shape[1]
    tiles = tiles_of(slots, experts, rows)
    row, of_tile, valid = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (slots, tiles, 1))
    y = torch.empty(tiles * rows, H, dtype=x.dtype, device=x.device)
    how = {k: v for k, v in pdl(x).items() if k != "TRIGGER"}  # no trigger: the product reads nothing before it waits
    _sort_kernel[(slots,)](
        ids, x, row, of_tile, valid, y, slots, tiles, H, E=experts, BINS=triton.next_power_of_2(experts + 1),
        TOP_K=ids.shape[1], ROWS=rows, SLOTS=triton.next_power_of_2(slots), BLOCK=min(1024, triton.next_power_of_2(H)), **how,
    )  # fmt: skip
    return y, row, of_tile, valid


def tiles_of(slots: int, experts: int, rows: int) -> int:
    """Max. tiles of so many rows that the slots fill, each expert's padded to whole tiles."""
    return min(slots, slots // rows + experts)


def place(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids (T, top_k) -> for tiles of `rows`: the row of each slot (T * top_k,), of each row the token + 1, or 0 (P,), the
    expert of each tile (P / rows,), and how many rows there are (1,); all int32."""
    slots = ids.numel()
    tiles = tiles_of(slots, experts, rows)
    zeroed = torch.zeros(experts + tiles * rows, dtype=torch.int32, device=ids.device)
    counts, tokens = zeroed[:experts], zeroed[experts:]
    ranks, row = torch.empty(2, slots, dtype=torch.int32, device=ids.device)
    of_tile = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    valid = torch.empty(1, dtype=torch.int32, device=ids.device)
    _count_kernel[(math.ceil(slots / BLOCK),)](ids, counts, ranks, slots, BLOCK=BLOCK)
    few = 64  # slots per program that compares its slots with all experts
    _place_kernel[(math.ceil(max(slots, tiles) / few),)](
        ids, counts, ranks, row, tokens, of_tile, valid, slots, tiles,
        E=experts, EXPERTS=triton.next_power_of_2(experts), TOP_K=ids.shape[1], ROWS=rows, BLOCK=few,
    )  # fmt: skip
    return row, tokens, of_tile, valid


def between(h: torch.Tensor, act: str) -> torch.Tensor:
    """What the second product multiplies: act(gate) * up of rows (P, 2 width), or act of rows (P, width); act: one of ACTS."""
    return activated(h, act.removeprefix(UNGATED)) if act.startswith(UNGATED) else gated(h, act)


def weighed(y: torch.Tensor, row: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each token the sum over its slots of weights (M, top_k) * their rows of y (P, H), in fp32 -> (M, H)."""
    (M, top_k), H = weights.shape, y.shape[1]
    out = torch.empty(M, H, dtype=y.dtype, device=y.device)
    of_slots = weights.float().contiguous()
    _weigh_kernel[(M, math.ceil(H / BLOCK))](y, row, of_slots, out, H, TOP_K=top_k, BLOCK=BLOCK, **pdl(y))
    return out


def _refuse(call: ExpertsCall) -> str | None:
    if call.shared:
        return "takes no shared expert"
    if call.activation not in ACTS:
        return f"takes the activations {', '.join(ACTS)}, not {call.activation}"
    for N, K, scheme, layout in (call.gate_up, call.down):
        if scheme is None or (scheme.table_width and N % 32):
            return "takes packed experts, whole row tiles of a table"
        if why := tile_wgmma_grouped.why_not(scheme, K, layout, call.capability):
            return why
    return None


def _prefers(call: ExpertsCall) -> bool:
    return many_slots(call)


@register("cuda/grouped_experts", op="experts", rank=20, prefer=_prefers, refuse=_refuse)
def grouped_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack, act: str, config: Config
) -> torch.Tensor:
    """For each row of x (M, H) the sum over its experts ids (M, top_k) of weights (M, top_k) * down(act(gate x) * up x).

    act: one of ACTS. The products and what is between them are rounded to x's dtype, the sum once.
    """
    (M, H), (experts, top_k) = x.shape, (gate_up.words.shape[0], ids.shape[1])
    if M == 0:
        return torch.empty_like(x)
    assert down.scheme is not None
    rows = tile_wgmma_grouped.block(M * top_k, experts, down.scheme.bits)
    x, ids = x.contiguous(), ids.contiguous()
    if M * top_k <= MOST_SORTED:
        sorted_x, row, of_tile, valid = sort(x, ids, experts, rows)
    else:
        row, tokens, of_tile, valid = place(ids, experts, rows)
        sorted_x = torch.empty(tokens.shape[0], H, dtype=x.dtype, device=x.device)
        _gather_kernel[(tokens.shape[0],)](x, tokens, sorted_x, H, BLOCK=min(1024, triton.next_power_of_2(H)))

    def product(x: torch.Tensor, s: Stack) -> torch.Tensor:
        return tile_wgmma_grouped.grouped(x, s.side_by_side(), s.bias, s.N, rows, of_tile, valid)

    return weighed(product(between(product(sorted_x, gate_up), act), down), row, weights)
