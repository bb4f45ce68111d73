"""The decode operations in torch: the definitions that tests hold every kernel to, and the fallback of every device.

Shapes   B sequences, HQ query heads, HKV key heads, D head dim, S slots of the cache, R rotated dims (even, <= D)
         qkv (..., (HQ + 2 HKV) * D): q heads, k heads, v heads of one token, as one packed matmul writes them
         cache k, v (B, HKV, S, D); cos, sin (S, R): slot s is position s of its sequence
         paged: k, v (blocks, HKV, BLOCK, D); table (rows, most) int32: slot s of row r is slot s % BLOCK of block
         table[r, s // BLOCK]. BLOCK: a power of two from 16 up. Dummy rows may share a block
         a cache in fewer bits is a `kv.Coded` of these shapes; every token, the newest too, is read back from its codes
Rounding everything in fp32 from its 16-bit inputs, rounded once to the dtype of the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from lowq_kernels.decode.activation import gated as gated
from lowq_kernels.decode.kv import Cache, Coded, turn
from lowq_packers.scheme import Act

SHARED = "keys of another layer"  # in `Heads.beyond`


@dataclass(frozen=True)
class Heads:
    """Geometry of one layer's attention. window: a token sees itself and the window - 1 tokens before it; 0: all of them.

    q_norm, k_norm: (D,) RMSNorm weights over each head, or None; eps is theirs. sinks: (HQ,) fp32, a score of each head that
    takes its share of the softmax and has no value; or None.
    softcap: scores s are softcap * tanh(s / softcap). chunk: a token sees its own chunk of so many positions alone.
    act: see `PromptCall.act`; in layers with a window or sinks it says nothing.
    writes: whether there are k and v; else qkv is q alone, (..., HQ * D), and the cache, another layer's, is only read.
    """

    HQ: int
    HKV: int
    D: int
    scale: float
    window: int = 0
    eps: float = 0.0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    softcap: float = 0.0
    chunk: int = 0
    writes: bool = True
    act: Act = "none"

    @property
    def beyond(self) -> tuple[str, ...]:
        """Names of facts, beyond GQA, a window, q's and k's norms and sinks, that a kernel must support to take this layer."""
        facts = {"softcap": self.softcap != 0.0, "chunk": self.chunk != 0, SHARED: not self.writes}
        return tuple(name for name, there in facts.items() if there)

    @property
    def span(self) -> int:
        """Max. slots that a token sees; 0: all."""
        return min(filter(None, (self.window, self.chunk)), default=0)

    def first(self, place: int) -> int:
        """The first slot that the token at `place` sees."""
        return max(place + 1 - self.window if self.window else 0, place - place % self.chunk if self.chunk else 0)

    def visible(self, seen: torch.Tensor, own: torch.Tensor, until: torch.Tensor | None = None) -> torch.Tensor:
        """Whether the token at slot `own` sees slot `seen`; broadcast. until: the last slot that it sees, if not its own."""
        mask = seen <= (own if until is None else until)
        if self.window:
            mask &= seen > own - self.window
        if self.chunk:
            mask &= seen >= own - own % self.chunk
        return mask


TILE = 128  # max. tokens per tile of `Packed`; half for heads of more than 128 dims


@dataclass(frozen=True)
class Packed:
    """Tokens of several sequences, concatenated without padding; all int32 on one device.

    pos, rows: (M,) each token's slot, and its sequence's row of `table` (rows, most). tiles: (n, 2) first and end of tokens of
    one sequence. Each token is in one tile; padding tokens are in none, and their output is undefined. units: how many times
    128 slots the sequences take up to their last tokens, each sequence rounded up; 0: unknown on the host. sequences: how many.
    """

    table: torch.Tensor
    rows: torch.Tensor
    pos: torch.Tensor
    tiles: torch.Tensor
    units: int = 0
    sequences: int = 1


def tile_rows(D: int) -> int:
    """Max. tokens per tile of `Packed` with heads of D dims."""
    return TILE if D <= 128 else TILE // 2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., K) / sqrt(mean(x^2) + eps) * weight (K,) over the last dim, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, post: torch.Tensor | None = None
) -> torch.Tensor:
    """x += delta in place (delta first normed with `post`, where there is one), then RMSNorm(x). All (M, H)."""
    if delta is not None:
        x += delta if post is None else rms_norm(delta, post, eps).to(x.dtype)
    return rms_norm(x, weight, eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on the first R of D dims, halves paired: x (..., D) fp32, cos and sin broadcastable (..., R)."""
    R = cos.shape[-1]
    first, second = x[..., : R // 2], x[..., R // 2 : R]
    rotated = x[..., :R] * cos.float() + torch.cat((-second, first), -1) * sin.float()
    return rotated if x.shape[-1] == R else torch.cat((rotated, x[..., R:]), -1)


def split_heads(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, h: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv (..., (HQ + 2 HKV) * D) -> q (..., HQ, D), k, v (..., HKV, D), normed and rotated; cos, sin (..., R).

    For a layer without k and v of its own, k and v have no heads.
    """
    HKV = h.HKV if h.writes else 0
    parts = qkv.reshape(*qkv.shape[:-1], h.HQ + 2 * HKV, h.D)
    qk, v = parts[..., : h.HQ + HKV, :].float(), parts[..., h.HQ + HKV :, :]
    if h.q_norm is not None and not h.writes:
        qk = rms_norm(qk, h.q_norm, h.eps)
    elif h.q_norm is not None and h.k_norm is not None:
        q, k = rms_norm(qk[..., : h.HQ, :], h.q_norm, h.eps), rms_norm(qk[..., h.HQ :, :], h.k_norm, h.eps)
        qk = torch.cat((q, k), -2)
    qk = rotate(qk, cos.unsqueeze(-2), sin.unsqueeze(-2)).to(qkv.dtype)
    return qk[..., : h.HQ, :], qk[..., h.HQ :, :], v


class Places(NamedTuple):
    """Where a step's tokens stand, one of each of B sequences. pos (B,): their positions. cos, sin (S, R): of all positions.

    With a `table` the caches are paged; its first B rows belong to the sequences. order (B,) int32: the sequences, longest
    first, a hint that makes some kernels faster; no result depends on it.
    """

    pos: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None


def attend(qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads) -> torch.Tensor:
    """One token per sequence: write its k, v at slot pos[b], attend to slots 0 .. pos[b]. qkv (B, ...) -> (B, HQ * D)."""
    (pos, cos, sin, table, _), B, slots = at, qkv.shape[0], at.pos.long()
    q, k, v = split_heads(qkv, cos[slots], sin[slots], h)
    if table is not None:
        if h.writes:
            write((k_cache, v_cache), (k, v), table, torch.arange(B, device=pos.device), slots)
        one = ((row, place, q[row, :, None]) for row, place in enumerate(slots.tolist()))
        return torch.cat([_causal(*each, k_cache, v_cache, table, h) for each in one])
    places = slots.tolist()
    for b, p in enumerate(places if h.writes else ()):
        k_cache[b, :, p], v_cache[b, :, p] = k[b], v[b]
    n = max(places) + 1
    mask = h.visible(torch.arange(n, device=pos.device), slots[:, None])
    q = q.reshape(B, h.HKV, h.HQ // h.HKV, h.D)  # the queries of one key head side by side: one product for all of them
    plain = min(places) == n - 1 and not h.first(n - 1)
    bias = None if plain else mask[:, None, None]
    k_all, v_all = k_cache[:, :, :n], v_cache[:, :, :n]
    y = softmax_product(q.to(k_all.dtype), k_all, v_all, bias, h)
    return y.reshape(B, h.HQ * h.D).to(qkv.dtype)


def attend_fixed(qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads) -> torch.Tensor:
    """As `attend`, by operations whose shapes do not depend on `pos`, so that a CUDA graph can capture them: it reads all slots
    of a cache or of a table's width, and of a window all its slots. The content of slots that no token sees has no effect."""
    (pos, cos, sin, table, _), B, slots = at, qkv.shape[0], at.pos.long()
    q, k, v = split_heads(qkv, cos[slots], sin[slots], h)
    rows = torch.arange(B, device=pos.device)
    if h.writes and table is None:
        k_cache[rows, :, slots], v_cache[rows, :, slots] = k, v
    elif h.writes and table is not None:
        write((k_cache, v_cache), (k, v), table, rows, slots)
    (k_all, v_all), positions = gathered((k_cache, v_cache), slots, h, table)
    mask = h.visible(positions, slots[:, None])
    k_all, v_all = (torch.where(mask[:, None, :, None], t, 0) for t in (k_all, v_all))
    q = q.reshape(B, h.HKV, h.HQ // h.HKV, h.D).to(k_all.dtype)
    y = softmax_product(q, k_all, v_all, mask[:, None, None], h)
    return y.reshape(B, h.HQ * h.D).to(qkv.dtype)


def gathered(
    caches: Sequence[Cache], at: torch.Tensor, h: Heads, table: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The cached heads (B, HKV, n, D) that tokens at slots `at` (B,) may see, and their slots (B, n), some past the last."""
    S, B = caches[0].shape[2], at.shape[0]
    last = S - 1 if table is None else table.shape[1] * S - 1
    first = at.new_zeros(B)
    if h.window:
        first = (at + 1 - h.window).clamp(min=0)
    if h.chunk:
        first = torch.maximum(first, at - at % h.chunk)
    if table is None:
        n = min(h.span or S, S)
        positions = first[:, None] + torch.arange(n, device=at.device)
        rows = torch.arange(B, device=at.device)[:, None]
        entries = [c[:B] if n == S else c[rows, :, positions.clamp(max=last)].transpose(1, 2) for c in caches]
        return entries, torch.arange(S, device=at.device).expand(B, S) if n == S else positions
    n = min(-(-h.span // S) + 1 if h.span else table.shape[1], table.shape[1])
    blocks = (first // S)[:, None] + torch.arange(n, device=at.device)
    here = table[:B].long().gather(1, blocks.clamp(max=table.shape[1] - 1))
    entries = [c[here].transpose(1, 2).flatten(2, 3) for c in caches]
    return entries, (blocks[..., None] * S + torch.arange(S, device=at.device)).flatten(1)


def attend_prompt(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    start: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens start .. start + T of every sequence: write their k, v, attend causally. qkv (B, T, ...) -> (B, T, HQ * D).

    until (B, T): the last slot that a token sees, below start + T; None: its own.
    """
    B, T = qkv.shape[:2]
    end = start + T
    q, k, v = split_heads(qkv, cos[start:end], sin[start:end], h)
    if h.writes:
        k_cache[:, :, start:end], v_cache[:, :, start:end] = k.transpose(1, 2), v.transpose(1, 2)
    k_all, v_all = (c[:, :, :end].repeat_interleave(h.HQ // h.HKV, 1) for c in (k_cache, v_cache))
    q = q.to(k_all.dtype)
    if until is None and start == 0 and h.sinks is None and not h.softcap and not (h.span and end > h.span):
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k_all, v_all, is_causal=True, scale=h.scale)
    else:
        positions, queries = torch.arange(end, device=qkv.device), torch.arange(start, end, device=qkv.device)[:, None]
        mask = h.visible(positions, queries, None if until is None else until[:, None, :, None])
        y = softmax_product(q.transpose(1, 2), k_all, v_all, mask, h)
    return y.transpose(1, 2).reshape(B, T, h.HQ * h.D).to(qkv.dtype)


def attend_packed(
    qkv: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    p: Packed,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens of `p`: write their k, v into paged caches, attend causally. qkv (M, ...) -> (M, HQ * D).

    until (M,): the last slot that a token sees, of those written before or now; None: its own.
    """
    at = p.pos.long()
    q, k, v = split_heads(qkv, cos[at], sin[at], h)
    if h.writes:
        write((k_cache, v_cache), (k, v), p.table, p.rows.long(), at)
    y = torch.zeros(q.shape[0], h.HQ * h.D, dtype=qkv.dtype, device=qkv.device)
    for first, end in p.tiles.tolist():
        if first < end:
            row, place = int(p.rows[first]), int(at[first])
            last = None if until is None else until[first:end]
            y[first:end] = _causal(row, place, q[first:end].transpose(0, 1), k_cache, v_cache, p.table, h, last)
    return y


def in_e4m3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unit: int = 128
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (..., T, D), k and v (..., S, D) as attention of prompts in fp8 rounds them, in fp32: q by token, k and v by `unit`
    slots, v by powers of two. q and k are Hadamard-transformed first, which leaves q k as it is. What it does not define: the
    weights of values are rounded to e4m3, too."""

    def rounded(x: torch.Tensor, power: bool = False) -> torch.Tensor:
        scale = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-18) / 448
        scale = torch.exp2(torch.floor(torch.log2(scale)) + 1) if power else scale
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    q, k = turn(q.float()), turn(k.float())
    parts = (x.float().split(unit, -2) for x in (k, v))
    k, v = (torch.cat([rounded(x, power) for x in units], -2) for units, power in zip(parts, (False, True), strict=True))
    return rounded(q.float().unsqueeze(-2)).squeeze(-2), k, v


def write(
    caches: Sequence[Cache], held: Sequence[torch.Tensor], table: torch.Tensor, rows: torch.Tensor, at: torch.Tensor
) -> None:
    """Write (M, HKV, D) into each paged cache, at slots `at` (M,) of `rows` (M,)."""
    BLOCK = caches[0].shape[2]
    blocks = table[rows, at // BLOCK].long()
    for cache, x in zip(caches, held, strict=True):
        cache[blocks, :, at % BLOCK] = x


def _causal(
    row: int,
    place: int,
    q: torch.Tensor,
    k_cache: Cache,
    v_cache: Cache,
    table: torch.Tensor,
    h: Heads,
    until: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q (HQ, T, D), slots place .. place + T of a row, over the row's tokens so far -> (T, HQ * D).

    until (T,): as in `attend_packed`.
    """
    T, BLOCK = q.shape[1], k_cache.shape[2]
    end = place + T if until is None else max(place + T, int(until.max()) + 1)
    begin = h.first(place) // BLOCK
    blocks = table[row, begin : -(-end // BLOCK)].long()
    k, v = (slots_of(c, blocks)[:, : end - begin * BLOCK] for c in (k_cache, v_cache))
    dtype, q = q.dtype, q.to(k.dtype)
    positions, queries = (
        torch.arange(begin * BLOCK, end, device=q.device),
        torch.arange(place, place + T, device=q.device)[:, None],
    )
    mask = h.visible(positions, queries, None if until is None else until[:, None])
    if T == 1 and until is None:  # the queries of one key head side by side: one product for all of them
        q, bias = q.reshape(1, h.HKV, h.HQ // h.HKV, h.D), mask if h.span else None
        return softmax_product(q, k[None], v[None], bias, h).reshape(1, h.HQ * h.D).to(dtype)
    k, v = (c.repeat_interleave(h.HQ // h.HKV, 0)[None] for c in (k, v))
    y = softmax_product(q[None], k, v, mask, h)[0]
    return y.transpose(0, 1).reshape(T, h.HQ * h.D).to(dtype)


def softmax_product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, h: Heads) -> torch.Tensor:
    """Attention of q (B, rows, columns, D), HQ heads one after another, where `mask` is true; sinks as one slot more."""
    if h.softcap:
        return _capped(q, k, v, mask, h)
    if h.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=h.scale)
    bias = torch.zeros(*q.shape[:3], k.shape[2] + 1, dtype=q.dtype, device=q.device)
    if mask is not None:
        bias[..., :-1].masked_fill_(~mask, -torch.inf)
    bias[..., -1] = h.sinks.reshape(q.shape[1], -1).to(q.dtype)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return F.scaled_dot_product_attention(q, k, v, bias, scale=h.scale)


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, h: Heads) -> torch.Tensor:
    """As `softmax_product`, with a soft cap on the scores."""
    scores = h.softcap * torch.tanh(q.float() @ k.float().transpose(-1, -2) * (h.scale / h.softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if h.sinks is not None:
        sinks = h.sinks.float().reshape(1, q.shape[1], -1, 1).expand(*q.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)


def slots_of(cache: Cache, blocks: torch.Tensor) -> torch.Tensor:
    """The slots of these blocks in order, (HKV, n * BLOCK, D): a view if the blocks are adjacent in memory."""
    if isinstance(cache, Coded):
        return cache[blocks].transpose(0, 1).flatten(1, 2)
    first, n = int(blocks[0]), len(blocks)
    by_head = cache.transpose(0, 1)
    if by_head.is_contiguous() and int(blocks[-1]) == first + n - 1 and bool((blocks.diff() == 1).all()):
        return by_head[:, first : first + n].flatten(1, 2)
    return by_head.index_select(1, blocks).flatten(1, 2)


def choose(
    logits: torch.Tensor, token: torch.Tensor, pos: torch.Tensor, seed: torch.Tensor, temperature: float, advance: int
) -> None:
    """Write the next token (B,) int64 and add `advance` to pos (B,) int32, in place.

    temperature 0 is the argmax (the lowest id on a tie). Otherwise an exponential race: argmax(p / e) with e ~ Exp(1) is i
    with probability p[i], and logits that differ in their last bits draw another token as rarely as can be. The numbers e are
    numpy's, by Philox keyed by `seed` (1,) int64, the new token's position and its row, so that a position draws the same on
    every run. A core makes 151,936 of them in 0.9 ms, with torch in 3.3. The Triton kernel has other random numbers: the same
    distribution, other draws.
    """
    pos += advance
    if temperature == 0:
        token.copy_(logits.argmax(-1))
        return
    p = (logits.float() / temperature).softmax(-1).cpu().numpy()
    for b, at in enumerate(pos.tolist()):
        token[b] = race(p[b], np.random.Philox(key=[int(seed), at << 32 | b]))


def race(p: NDArray[np.float32], numbers: np.random.BitGenerator) -> int:
    """A token with the probabilities p (V,) fp32: the argmax of p / e with e ~ Exp(1), which is 0 once in 2^53 numbers."""
    return int((p / np.random.Generator(numbers).standard_exponential(len(p))).argmax())


def choose_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token: torch.Tensor,
    pos: torch.Tensor,
    seed: torch.Tensor,
    temperature: torch.Tensor,
) -> None:
    """The next tokens of some of many sequences: logits (M, V), rows (M,) int32 -> token, pos of those rows, in place.

    token, seed (R,) int64, pos (R,) int32, temperature (R,) fp32. As `choose` with advance 1, each row with its own
    temperature and seed: its draw depends on these and its position alone. If a row occurs twice, either draw may win.
    """
    if not temperature[rows].any():
        pos[rows] += 1
        token[rows] = logits.argmax(-1)
        return
    for i, row in enumerate(rows.tolist()):
        target, one, place = token[row : row + 1], logits[i : i + 1], pos[row : row + 1]
        choose(one, target, place, seed[row], float(temperature[row]), 1)


# The rows of a pass by sequence: (n,) int64 the first row, (n,) the number of rows (0: unused entry), and the largest number.
Groups = tuple[torch.Tensor, torch.Tensor, int]


def attend_rows(
    qkv: torch.Tensor, k_cache: Cache, v_cache: Cache, at: Places, h: Heads, groups: Groups | None = None
) -> torch.Tensor:
    """As `attend` with a `table` in which several rows may name the same blocks: all rows write before any row reads. groups:
    the rows of each sequence, a hint that makes some kernels faster; y does not depend on it."""
    return attend(qkv, k_cache, v_cache, at, h)


MOST_DRAFTS = 15  # max. draft tokens per step and sequence: with the newest token 16 rows, the M of a tensor core's tile


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
    """Accept drafts: sequence i has the rows first[i] .. first[i] + count[i] of a pass, its newest token and then up to
    MOST_DRAFTS draft tokens.

    ids, drawn (M,) int64: the rows' tokens, and the token drawn after each. A draft is accepted if it equals the token drawn
    after the row before it, and all earlier drafts are accepted. first, count, rows (n,): rows[i] indexes the sequence's newest
    token in token (R,) int64 and its position in pos (R,) int32; both move to the token drawn after the last accepted draft.
    accepted (n,) int64: the number of accepted drafts, written.
    """
    after = torch.arange(MOST_DRAFTS, device=ids.device)
    at, inside = first[:, None] + after, after < count[:, None] - 1
    last = ids.shape[0] - 1
    right = (drawn[at.clamp(max=last)] == ids[(at + 1).clamp(max=last)]) & inside
    accepted.copy_(right.long().cumprod(1).sum(1))
    token[rows] = drawn[first + accepted]
    pos[rows] += (accepted + 1).to(pos.dtype)
