"""Latent attention (MLA): a token caches one latent and one rotated key for all heads. The definition, in torch and fp32.

A cache (B or blocks, 1, S or BLOCK, rank + rotated) holds the normed latent and the rotated key, and no values.
The absorbed form projects a head's query into the latent space, k_up^T q, and the output back to its values, v_up y: for few
queries that is the least work. For many queries of a prompt it is less work to compute every head's keys and values from the
latents.
Source: DeepSeek-V2 (arXiv:2405.04434).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lowq_kernels.decode import norms, reference
from lowq_kernels.decode.kv import PLAIN, Cache, kind_of, part
from lowq_kernels.decode.norms import Norm
from lowq_kernels.decode.prepare import Pairing, PositionScale, position_factors, rotate
from lowq_kernels.decode.reference import Heads, Packed, Places
from lowq_kernels.decode.runs import Runs
from lowq_kernels.dispatch.registry import FLOATS, LAST_RESORT, Op, capability, register, select

AT_ONCE = 1 << 24  # max. scores, or values of keys, computed at once: 64 MiB in fp32


@dataclass(frozen=True)
class Latent:
    """Facts and weights of one layer. q's rows hold, per head, its unrotated values, then its rotated ones.

    k_up (heads, nope, rank), v_up (heads, v_dim, rank): the two parts of the product from a latent to a head's keys and values.
    norm: of the latent. pairing: of the rotation, see `prepare.Prepared`.
    """

    heads: int
    nope: int
    rotated: int
    v_dim: int
    rank: int
    scale: float
    k_up: torch.Tensor
    v_up: torch.Tensor
    norm: Norm
    pairing: Pairing = "halves"
    position_scale: PositionScale | None = None


@dataclass(frozen=True)
class LatentCall:
    """One token of each of M sequences, over caches of S slots. block: slots of a block of a paged cache, or 0.

    Its kernels are launch(q, latent, cache, places, facts, config) -> y, as `step`.
    """

    op: ClassVar[Op] = "latent"
    M: int
    S: int
    heads: int
    nope: int
    rotated: int
    v_dim: int
    rank: int
    pairing: Pairing
    position_scale: bool
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]
    block: int = 0
    kv: str = PLAIN


@dataclass(frozen=True)
class Forms:
    """The forms of the operation: steps, prompts of a static cache, packed prompts of a paged one.

    refuse: of a dtype, a cache and a layer's facts, why `packed` waits for the device, so that no graph can record it; or None.
    """

    step: Callable[..., torch.Tensor]
    prompt: Callable[..., torch.Tensor]
    packed: Callable[..., torch.Tensor]
    refuse: Callable[[torch.dtype, Cache, Latent], str | None]


def step(q: torch.Tensor, latent: torch.Tensor, cache: Cache, at: Places, f: Latent) -> torch.Tensor:
    """One token per sequence: q (B, heads * (nope + rotated)), latent (B, rank + rotated) as its product gives it ->
    (B, heads * v_dim)."""
    n = int(at.pos.max()) + 1  # slots that hold a token of some sequence
    if at.table is None:
        cache = part(cache, (slice(None), slice(None), slice(n)))
    else:
        at = at._replace(table=at.table[:, : -(-n // cache.shape[2])])
    return step_fixed(q, latent, cache, at, f)


def step_fixed(q: torch.Tensor, latent: torch.Tensor, cache: Cache, at: Places, f: Latent) -> torch.Tensor:
    """As `step`, by operations whose shapes do not depend on `pos`, as `reference.attend_fixed`."""
    (pos, cos, sin, table, _), slots = at, at.pos.long()
    queries, keys = _prepared(q, latent, pos, cos[slots], sin[slots], f)
    rows = torch.arange(q.shape[0], device=q.device)
    if table is None:
        cache[rows, :, slots] = keys[:, None]
    else:
        reference.write((cache,), (keys[:, None],), table, rows, slots)
    h = Heads(f.heads, 1, f.rank + f.rotated, f.scale)
    (entries,), positions = reference.gathered((cache,), slots, h, table)
    mask = h.visible(positions, slots[:, None])
    entries = torch.where(mask[:, None, :, None], entries.float(), 0)
    y = reference.softmax_product(_absorbed(queries, f)[:, None], entries, entries[..., : f.rank], mask[:, None, None], h)[:, 0]
    return torch.einsum("bhr,hvr->bhv", y, f.v_up.float()).flatten(1).to(q.dtype)


def prompt(
    q: torch.Tensor,
    latent: torch.Tensor,
    cache: Cache,
    start: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    f: Latent,
    at_once: int = AT_ONCE,
) -> torch.Tensor:
    """Tokens start .. start + T of every sequence of a static cache: q and latent (B, T, ...) -> (B, T, heads * v_dim)."""
    B, T = q.shape[:2]
    pos = torch.arange(start, start + T, device=q.device)
    y = []
    for b in range(B):
        queries, keys = _prepared(q[b], latent[b], pos, cos[start : start + T], sin[start : start + T], f)
        cache[b, 0, start : start + T] = keys
        y.append(_run(queries, cache[b, 0, : start + T].float(), f, at_once))
    return torch.stack(y).to(q.dtype)


def packed(
    q: torch.Tensor,
    latent: torch.Tensor,
    cache: Cache,
    p: Packed,
    cos: torch.Tensor,
    sin: torch.Tensor,
    f: Latent,
    own: Runs | None = None,
) -> torch.Tensor:
    """The tokens of `p` over a paged cache: q and latent (M, ...) -> (M, heads * v_dim); a token in no tile gives zeros.
    own: the tokens by sequence, where the host knows them; here they are read from the device."""
    at, BLOCK = p.pos.long(), cache.shape[2]
    queries, keys = _prepared(q, latent, p.pos, cos[at], sin[at], f)
    reference.write((cache,), (keys[:, None],), p.table, p.rows.long(), at)
    y = torch.zeros(q.shape[0], f.heads * f.v_dim, dtype=q.dtype, device=q.device)
    for first, end in runs(p):
        n = int(at[end - 1]) + 1
        entries = reference.slots_of(cache, p.table[int(p.rows[first]), : -(-n // BLOCK)].long())
        y[first:end] = _run(queries[first:end], entries[0, :n].float(), f).to(q.dtype)
    return y


def runs(p: Packed) -> list[tuple[int, int]]:
    """First and end of each sequence's tokens: its tiles joined."""
    spans: list[tuple[int, int]] = []
    rows = p.rows.tolist()
    for first, end in p.tiles.tolist():
        if first >= end:
            continue
        if spans and spans[-1][1] == first and rows[first - 1] == rows[first]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((first, end))
    return spans


def _prepared(
    q: torch.Tensor, latent: torch.Tensor, pos: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, f: Latent
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (M, heads, nope + rotated) in fp32, and cache entries (M, rank + rotated) in the dtype of latent, both rotated by
    cos, sin (M, rotated)."""
    q = q.unflatten(1, (f.heads, -1)).float()
    q = torch.cat((q[..., : f.nope], rotate(q[..., f.nope :], cos, sin, f.pairing)), -1)
    if f.position_scale is not None:
        q = q * position_factors(pos, f.position_scale)
    normed, key = norms.in_fp32(latent[:, : f.rank], f.norm), latent[:, None, f.rank :].float()
    return q, torch.cat((normed, rotate(key, cos, sin, f.pairing)[:, 0]), -1).to(latent.dtype)


def _absorbed(q: torch.Tensor, f: Latent) -> torch.Tensor:
    """Queries (M, heads, nope + rotated) projected into the dims of cache entries, (M, heads, rank + rotated)."""
    return torch.cat((torch.einsum("mhn,hnr->mhr", q[..., : f.nope], f.k_up.float()), q[..., f.nope :]), -1)


def _run(q: torch.Tensor, held: torch.Tensor, f: Latent, at_once: int = AT_ONCE) -> torch.Tensor:
    """Attention of the last T tokens of a sequence: q (T, heads, nope + rotated), held (n, rank + rotated) of all n tokens ->
    (T, heads * v_dim), all fp32."""
    T, n = q.shape[0], held.shape[0]
    latents, keys = held.split((f.rank, f.rotated), -1)
    k_up, v_up = f.k_up.float(), f.v_up.float()
    if absorbs(T, n, f):
        y = _causal(_absorbed(q, f).transpose(0, 1), held, latents, f.scale, at_once) @ v_up.transpose(1, 2)
        return y.transpose(0, 1).flatten(1)
    each = max(1, at_once // (n * (f.nope + f.rotated + f.v_dim)))  # heads
    parts = []
    for i in range(0, f.heads, each):
        k = latents @ k_up[i : i + each].transpose(1, 2)
        k = torch.cat((k, keys.expand(k.shape[0], -1, -1)), -1)
        v = latents @ v_up[i : i + each].transpose(1, 2)
        parts.append(_causal(q[:, i : i + each].transpose(0, 1), k, v, f.scale, at_once))
    return torch.cat(parts).transpose(0, 1).flatten(1)


def absorbs(T: int, n: int, f: Latent) -> bool:
    """Whether the absorbed form is less work for T queries over n tokens, in products of two numbers a head."""
    ups, pairs = f.rank * (f.nope + f.v_dim), T * n
    return T * ups + pairs * (2 * f.rank + f.rotated) <= n * ups + pairs * (f.nope + f.rotated + f.v_dim)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, at_once: int) -> torch.Tensor:
    """q (heads, T, d) of the last T tokens over k (n, d) or (heads, n, d) and v of all n -> (heads, T, e)."""
    (heads, T, _), n = q.shape, k.shape[-2]
    rows = max(1, at_once // (heads * n))
    parts = []
    for i in range(0, T, rows):
        positions = torch.arange(n - T + i, n - T + min(i + rows, T), device=q.device)[:, None]
        end = n - T + min(i + rows, T)
        scores = q[:, i : i + rows] @ k[..., :end, :].transpose(-1, -2) * scale
        scores = scores.masked_fill(torch.arange(end, device=q.device) > positions, -torch.inf)
        parts.append(scores.softmax(-1) @ v[..., :end, :])
    return torch.cat(parts, 1)


def dispatched(q: torch.Tensor, latent: torch.Tensor, cache: Cache, at: Places, f: Latent) -> torch.Tensor:
    """As `step`, by the kernel that dispatch chooses."""
    S, block = cache.shape[2], 0
    if at.table is not None:
        S, block = at.table.shape[1] * S, S
    sizes = (q.shape[0], S, f.heads, f.nope, f.rotated, f.v_dim, f.rank, f.pairing, f.position_scale is not None)
    call = LatentCall(*sizes, q.dtype, q.device.type, capability(q.device), block, kind_of(cache))
    spec, config = select(call)
    return spec.launch(q, latent, cache, at, f, config)


@register("torch/latent", op="latent", devices=("cpu", "cuda"), dtypes=(*FLOATS, torch.float32), rank=LAST_RESORT)
def by_definition(q: torch.Tensor, *operands: Any) -> torch.Tensor:
    """See `LatentCall`. On a GPU it uses only operations that a CUDA graph can capture."""
    return (step_fixed if q.is_cuda else step)(q, *operands[:-1])  # the last is the config


DEFINITION = Forms(step, prompt, packed, lambda dtype, cache, f: "reads the lengths of texts on the host")
