"""choose: logits -> the next token, and one position further, without the host.

Maths   argmax(logits / T + gumbel), gumbel = -log(-log(u)): a draw from softmax(logits / T); T = 0 is the plain argmax
Grid    best of each block of the vocabulary, (B, blocks), then the best of those, (B,)
Random  Philox keyed by the seed, counted by (token id, position of the new token, sequence): no state, the same on every run
Ties    the lowest token id
Source  own; the Gumbel-max trick
"""

# mypy: allow-untyped-defs
# (the arguments of a Triton kernel are pointers and blocks, which Python's types do not name)

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowq_kernels.decode.launch import pdl

BLOCK_V = 2048


@triton.jit
def _best_kernel(
    logits_ptr,
    pos_ptr,
    seed_ptr,
    best_ptr,
    where_ptr,
    V,
    inverse_temperature,
    advance,
    DRAW: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    b, block = tl.program_id(0), tl.program_id(1)
    offs = block * BLOCK_V + tl.arange(0, BLOCK_V)
    if TRIGGER:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    score = tl.load(logits_ptr + b.to(tl.int64) * V + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    if DRAW:
        at = tl.load(pos_ptr + b) + advance
        seed = tl.load(seed_ptr)
        zero = offs * 0
        bits, _, _, _ = tl.philox(seed, offs, zero + at, zero + b, zero)
        u = tl.uint_to_uniform_float(bits)
        u = tl.minimum(tl.maximum(u, 5.960464477539063e-08), 0.99999994)  # 2^-24 .. 1 - 2^-24: both logarithms finite
        score = score * inverse_temperature - tl.log(-tl.log(u))
    top = tl.max(score, 0)
    tl.store(best_ptr + b * tl.num_programs(1) + block, top)
    tl.store(where_ptr + b * tl.num_programs(1) + block, tl.min(tl.where(score == top, offs, V - 1), 0))


@triton.jit
def _choose_kernel(
    best_ptr, where_ptr, token_ptr, pos_ptr, V, blocks, advance, BLOCKS: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr
):
    b = tl.program_id(0)
    offs = tl.arange(0, BLOCKS)
    if TRIGGER:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    best = tl.load(best_ptr + b * blocks + offs, mask=offs < blocks, other=float("-inf"))
    where = tl.load(where_ptr + b * blocks + offs, mask=offs < blocks, other=2147483647)
    winner = tl.min(tl.where(best == tl.max(best, 0), where, V - 1), 0)  # NaN everywhere: still a token of the vocabulary
    tl.store(token_ptr + b, winner.to(tl.int64))
    tl.store(pos_ptr + b, tl.load(pos_ptr + b) + advance)


def choose(
    logits: torch.Tensor, token: torch.Tensor, pos: torch.Tensor, seed: torch.Tensor, temperature: float, advance: int
) -> None:
    """As `reference.choose`; logits (B, V) contiguous."""
    B, V = logits.shape
    blocks = triton.cdiv(V, BLOCK_V)
    best = torch.empty(B, blocks, dtype=torch.float32, device=logits.device)
    where = torch.empty(B, blocks, dtype=torch.int32, device=logits.device)
    _best_kernel[(B, blocks)](
        logits,
        pos,
        seed,
        best,
        where,
        V,
        1.0 / temperature if temperature else 1.0,
        advance,
        DRAW=temperature != 0,
        BLOCK_V=BLOCK_V,
        num_warps=8,
        **pdl(logits),
    )
    BLOCKS = triton.next_power_of_2(blocks)
    _choose_kernel[(B,)](best, where, token, pos, V, blocks, advance, BLOCKS=BLOCKS, num_warps=1, **pdl(logits))
