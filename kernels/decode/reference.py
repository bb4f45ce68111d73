"""The decode operations in torch: the definition the Triton kernels are held to, the CPU's path, and prefill.

Shapes   B sequences, HQ query heads, HKV key heads, D head dim, S slots of the cache, R rotated dims (even, <= D)
         qkv (..., (HQ + 2 HKV) * D): q heads, k heads, v heads of one token, as one packed matmul writes them
         cache k, v (B, HKV, S, D); cos, sin (S, R): slot s is position s of its sequence
Rounding everything in fp32 from its 16-bit inputs, rounded once to the dtype of the output.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Heads:
    """Geometry of one layer's attention. window: a token sees itself and the window - 1 before it; 0 is all of them.

    q_norm, k_norm: (D,) RMSNorm weights over each head, or None; eps is theirs.
    """

    HQ: int
    HKV: int
    D: int
    scale: float
    window: int = 0
    eps: float = 0.0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, post: torch.Tensor | None = None
) -> torch.Tensor:
    """x += delta in place (delta first normed with `post`, where there is one), then RMSNorm(x). All (M, H)."""
    if delta is not None:
        x += delta if post is None else rms_norm(delta, post, eps).to(x.dtype)
    return rms_norm(x, weight, eps).to(x.dtype)


def gated(gate_up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up for (M, 2 I) = gate, up side by side -> (M, I). act: "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, -1)
    if act == "silu":
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on the first R of D dims, halves paired: x (..., D) fp32, cos and sin broadcastable (..., R)."""
    R = cos.shape[-1]
    first, second = x[..., : R // 2], x[..., R // 2 : R]
    turned = x[..., :R] * cos.float() + torch.cat((-second, first), -1) * sin.float()
    return turned if x.shape[-1] == R else torch.cat((turned, x[..., R:]), -1)


def split_heads(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, h: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv (..., (HQ + 2 HKV) * D) -> q (..., HQ, D), k, v (..., HKV, D), normed and rotated; cos, sin (..., R)."""
    parts = qkv.reshape(*qkv.shape[:-1], h.HQ + 2 * h.HKV, h.D)
    qk, v = parts[..., : h.HQ + h.HKV, :].float(), parts[..., h.HQ + h.HKV :, :]
    if h.q_norm is not None and h.k_norm is not None:
        q, k = rms_norm(qk[..., : h.HQ, :], h.q_norm, h.eps), rms_norm(qk[..., h.HQ :, :], h.k_norm, h.eps)
        qk = torch.cat((q, k), -2)
    qk = rotate(qk, cos.unsqueeze(-2), sin.unsqueeze(-2)).to(qkv.dtype)
    return qk[..., : h.HQ, :], qk[..., h.HQ :, :], v


def attend(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pos: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
) -> torch.Tensor:
    """One token per sequence: write its k, v at slot pos[b], attend to slots 0 .. pos[b]. qkv (B, ...) -> (B, HQ * D)."""
    B = qkv.shape[0]
    at = pos.long()
    q, k, v = split_heads(qkv, cos[at], sin[at], h)
    places = at.tolist()
    for b, p in enumerate(places):
        k_cache[b, :, p], v_cache[b, :, p] = k[b], v[b]
    n = max(places) + 1
    seen = torch.arange(n, device=pos.device)
    mask = seen <= at[:, None]
    if h.window:
        mask &= seen > at[:, None] - h.window
    q = q.reshape(B, h.HKV, h.HQ // h.HKV, h.D)  # the queries of one key head side by side: one product for all of them
    plain = min(places) == n - 1 and not (h.window and n > h.window)
    bias = None if plain else mask[:, None, None]
    y = F.scaled_dot_product_attention(q, k_cache[:, :, :n], v_cache[:, :, :n], bias, scale=h.scale)
    return y.reshape(B, h.HQ * h.D)


def attend_prompt(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    h: Heads,
) -> torch.Tensor:
    """Tokens start .. start + T of every sequence: write their k, v, attend causally. qkv (B, T, ...) -> (B, T, HQ * D)."""
    B, T = qkv.shape[:2]
    end = start + T
    q, k, v = split_heads(qkv, cos[start:end], sin[start:end], h)
    k_cache[:, :, start:end], v_cache[:, :, start:end] = k.transpose(1, 2), v.transpose(1, 2)
    k_all, v_all = (c[:, :, :end].repeat_interleave(h.HQ // h.HKV, 1) for c in (k_cache, v_cache))
    if start == 0 and not (h.window and end > h.window):
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k_all, v_all, is_causal=True, scale=h.scale)
    else:
        seen, own = torch.arange(end, device=qkv.device), torch.arange(start, end, device=qkv.device)[:, None]
        mask = seen <= own
        if h.window:
            mask &= seen > own - h.window
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k_all, v_all, mask, scale=h.scale)
    return y.transpose(1, 2).reshape(B, T, h.HQ * h.D)


def route(
    x: torch.Tensor, router: torch.Tensor, top_k: int, normalise: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (M, top_k) int64 and weights (M, top_k) fp32 of each row of x (M, H): the likeliest by router (E, H).

    normalise: the weights sum to 1. rounded: they are rounded to x's dtype, as some models do.
    """
    top = F.linear(x, router).softmax(-1, dtype=torch.float32).topk(top_k)
    weights = top.values / top.values.sum(-1, keepdim=True) if normalise else top.values
    return top.indices, weights.to(x.dtype).float() if rounded else weights


def choose(
    logits: torch.Tensor, token: torch.Tensor, pos: torch.Tensor, seed: torch.Tensor, temperature: float, advance: int
) -> None:
    """Write the next token (B,) int64 and move pos (B,) int32 on by `advance`, in place.

    temperature 0 is the argmax (the lowest id on a tie). Otherwise an exponential race, seeded by `seed` (1,) int64 and
    the position of the new token, so that a position draws the same on every run. The Triton kernel's random numbers are
    its own: same law, other draws.
    """
    pos += advance
    if temperature == 0:
        token.copy_(logits.argmax(-1))
        return
    generator = torch.Generator(logits.device)
    p = (logits.float() / temperature).softmax(-1)
    for b, at in enumerate(pos.tolist()):
        generator.manual_seed((int(seed) * 1_000_003 + at * 65_537 + b) % (1 << 63))
        race = torch.empty_like(p[b]).exponential_(generator=generator).clamp_(min=2.0**-24)  # sampling.py says why
        token[b] = (p[b] / race).argmax()
