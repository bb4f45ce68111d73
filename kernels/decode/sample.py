"""choose, choose_rows: sample the next token on the device and advance the position; accept: count accepted drafts.

Maths   argmax(logits / T + gumbel), gumbel = -log(-log(u)): a draw from softmax(logits / T); T = 0 is the plain argmax
Grid    best of each block of the vocabulary, (B, blocks), then the best of those, (B,)
Random  Philox keyed by the seed, counted by (token id, position of the new token, sequence): no state, the same on every run;
        choose_rows leaves the sequence out: each sequence has its own seed, and its draws do not depend on the batch
Ties    the lowest token id
Source  own; the Gumbel-max trick
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl

from lowq_kernels.decode.launch import overlap, pdl
from lowq_kernels.decode.reference import MOST_DRAFTS

BLOCK_V = 2048  # tokens of the vocabulary per program


@triton.jit
def _gumbel(seed, ids, at, sequence):
    """One Gumbel number per token id: the argmax of logits plus these is a draw from the softmax."""
    zero = ids * 0
    bits, _, _, _ = tl.philox(seed, ids, zero + at, zero + sequence, zero)
    u = tl.uint_to_uniform_float(bits)
    u = tl.minimum(tl.maximum(u, 5.960464477539063e-08), 0.99999994)  # 2^-24 .. 1 - 2^-24: both logarithms finite
    return -tl.log(-tl.log(u))


@triton.jit
def _best_kernel(
    logits_ptr, rows_ptr, temperature_ptr, pos_ptr, seed_ptr, best_ptr, where_ptr, V, inverse_temperature, advance,
    DRAW: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    b, block = tl.program_id(0), tl.program_id(1)
    offs = block * BLOCK_V + tl.arange(0, BLOCK_V)
    overlap(PDL, TRIGGER)
    score = tl.load(logits_ptr + b.to(tl.int64) * V + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    if DRAW:
        score = score * inverse_temperature + _gumbel(tl.load(seed_ptr), offs, tl.load(pos_ptr + b) + advance, b)
    if ROWS:
        row = tl.load(rows_ptr + b)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            score = score / temperature + _gumbel(tl.load(seed_ptr + row), offs, tl.load(pos_ptr + row) + advance, 0)
    top = tl.max(score, 0)
    tl.store(best_ptr + b * tl.num_programs(1) + block, top)
    tl.store(where_ptr + b * tl.num_programs(1) + block, tl.min(tl.where(score == top, offs, V - 1), 0))


@triton.jit
def _choose_kernel(
    best_ptr, where_ptr, rows_ptr, token_ptr, pos_ptr, V, blocks, advance,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    offs = tl.arange(0, BLOCKS)
    overlap(PDL, TRIGGER)
    best = tl.load(best_ptr + b * blocks + offs, mask=offs < blocks, other=float("-inf"))
    where = tl.load(where_ptr + b * blocks + offs, mask=offs < blocks, other=2147483647)
    winner = tl.min(tl.where(best == tl.max(best, 0), where, V - 1), 0)  # NaN everywhere: still a token of the vocabulary
    row = b
    if ROWS:
        row = tl.load(rows_ptr + b)
    tl.store(token_ptr + row, winner.to(tl.int64))
    tl.store(pos_ptr + row, tl.load(pos_ptr + row) + advance)


@triton.jit
def _accept_kernel(
    drawn_ptr, ids_ptr, first_ptr, count_ptr, rows_ptr, token_ptr, pos_ptr, accepted_ptr, WIDTH: tl.constexpr
):  # fmt: skip
    i, offs = tl.program_id(0), tl.arange(0, WIDTH)
    first, drafts = tl.load(first_ptr + i), tl.load(count_ptr + i) - 1
    drawn = tl.load(drawn_ptr + first + offs, mask=offs < drafts, other=0)
    ids = tl.load(ids_ptr + first + 1 + offs, mask=offs < drafts, other=0)
    accepted = tl.min(tl.where((offs < drafts) & (drawn == ids), WIDTH, offs), 0)  # the first that is wrong, or the last row
    accepted = tl.maximum(tl.minimum(accepted, drafts), 0)
    row = tl.load(rows_ptr + i)
    tl.store(accepted_ptr + i, accepted)
    tl.store(token_ptr + row, tl.load(drawn_ptr + first + accepted))
    tl.store(pos_ptr + row, tl.load(pos_ptr + row) + 1 + accepted.to(tl.int32))


def choose(
    logits: torch.Tensor,
    token: torch.Tensor,
    pos: torch.Tensor,
    seed: torch.Tensor,
    temperature: float,
    advance: int,
    block: int = BLOCK_V,
) -> None:
    """As `reference.choose`; logits (B, V) contiguous. block: tokens of the vocabulary per program; no draw depends on it."""
    inverse = 1.0 / temperature if temperature else 1.0
    _launch(logits, None, None, token, pos, seed, inverse, advance, DRAW=temperature != 0, BLOCK_V=block)


def choose_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token: torch.Tensor,
    pos: torch.Tensor,
    seed: torch.Tensor,
    temperature: torch.Tensor,
    block: int = BLOCK_V,
) -> None:
    """As `reference.choose_rows`; everything contiguous. block: as `choose` has it."""
    _launch(logits, rows, temperature, token, pos, seed, 1.0, 1, DRAW=False, BLOCK_V=block)


def accept(
    drawn: torch.Tensor,
    ids: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    rows: torch.Tensor,
    token: torch.Tensor,
    pos: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """As `reference.accept`."""
    width = triton.next_power_of_2(MOST_DRAFTS)
    _accept_kernel[(first.shape[0],)](drawn, ids, first, count, rows, token, pos, accepted, WIDTH=width, num_warps=1)


def _launch(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: torch.Tensor | None,
    token: torch.Tensor,
    pos: torch.Tensor,
    seed: torch.Tensor,
    inverse_temperature: float,
    advance: int,
    DRAW: bool,
    BLOCK_V: int,
) -> None:
    B, V = logits.shape
    blocks, by_row = triton.cdiv(V, BLOCK_V), rows is not None
    best = torch.empty(B, blocks, dtype=torch.float32, device=logits.device)
    where = torch.empty(B, blocks, dtype=torch.int32, device=logits.device)
    operands, sizes = (logits, rows, temperature, pos, seed, best, where), (V, inverse_temperature, advance)
    _best_kernel[(B, blocks)](*operands, *sizes, DRAW=DRAW, ROWS=by_row, BLOCK_V=BLOCK_V, num_warps=8, **pdl(logits))
    BLOCKS, outputs = triton.next_power_of_2(blocks), (best, where, rows, token, pos)
    _choose_kernel[(B,)](*outputs, V, blocks, advance, ROWS=by_row, BLOCKS=BLOCKS, num_warps=1, **pdl(logits))
