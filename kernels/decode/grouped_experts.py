"""grouped_experts: a mixture layer for any number of tokens; it never waits for the device, so CUDA graphs can capture it.

    count, place    find the row of each slot (token, expert) among rows sorted by expert, each expert padded to whole tiles
    gather          copies x into those rows
    two products    cuda/tile_wgmma, grouped; between them act(gate) * up, or act(up)
    weigh           sums each token's slots in fp32
The order of an expert's rows is arbitrary: a row's sums do not depend on its neighbours.
"""

# mypy: allow-untyped-defs

import math

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.activation import UNGATED
from lowq_kernels.decode.elementwise import activated, gated
from lowq_kernels.decode.mixture import many_slots
from lowq_kernels.dispatch.registry import Config, register
from lowq_kernels.modules.stack import ExpertsCall, Stack
from lowq_kernels.products.cuda import tile_wgmma_grouped

ACTS = ("silu", "gelu_tanh", "clamped_swiglu", *(UNGATED + act for act in ("relu2", "silu", "gelu", "gelu_tanh", "relu")))
BLOCK = 256  # slots or features per program


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
def _weigh_kernel(y_ptr, rows_ptr, weights_ptr, out_ptr, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + k)
        total += weight * tl.load(y_ptr + row * H + at, mask=at < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + at, total.to(out_ptr.dtype.element_ty), mask=at < H)


def place(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids (T, top_k) -> for tiles of `rows`: the row of each slot (T * top_k,), of each row the token + 1, or 0 (P,), the
    expert of each tile (P / rows,), and how many rows there are (1,); all int32."""
    slots = ids.numel()
    tiles = min(slots, slots // rows + experts)
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


def _refuse(call: ExpertsCall) -> str | None:
    if call.act not in ACTS:
        return f"takes the activations {', '.join(ACTS)}, not {call.act}"
    for N, K, scheme, layout in (call.gate_up, call.down):
        if scheme is None or (scheme.table_width and N % 32):
            return "takes packed experts, whole row tiles of a table"
        if why := tile_wgmma_grouped.why_not(scheme, K, layout, call.capability):
            return why
    return None


def _prefers(call: ExpertsCall) -> bool:
    return many_slots(call) or call.act.startswith(UNGATED)  # which experts.cu does not take


@register("cuda/grouped_experts", op="experts", rank=20, prefer=_prefers, refuse=_refuse)
def grouped_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack, act: str, config: Config
) -> torch.Tensor:
    """For each row of x (M, H) the sum over its experts ids (M, top_k) of weights (M, top_k) * down(act(gate x) * up x).

    act: one of ACTS. The products and what is between them are rounded to x's dtype, the sum once.
    """
    (M, H), (experts, top_k) = x.shape, (gate_up.words.shape[0], ids.shape[1])
    y = torch.empty_like(x)
    if M == 0:
        return y
    rows = tile_wgmma_grouped.block(M * top_k, experts)
    row, tokens, of_tile, valid = place(ids.contiguous(), experts, rows)
    sorted_x = torch.empty(tokens.shape[0], H, dtype=x.dtype, device=x.device)
    _gather_kernel[(tokens.shape[0],)](x.contiguous(), tokens, sorted_x, H, BLOCK=min(1024, triton.next_power_of_2(H)))

    def product(x: torch.Tensor, s: Stack) -> torch.Tensor:
        return tile_wgmma_grouped.grouped(x, s.side_by_side(), s.bias, s.N, rows, of_tile, valid)

    h = product(sorted_x, gate_up)
    h = activated(h, act.removeprefix(UNGATED)) if act.startswith(UNGATED) else gated(h, act)
    out = product(h, down)
    _weigh_kernel[(M, math.ceil(H / BLOCK))](out, row, weights.float().contiguous(), y, H, TOP_K=top_k, BLOCK=BLOCK)
    return y
