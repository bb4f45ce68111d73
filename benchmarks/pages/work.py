"""What a described model computes and reads: floating point operations of a prompt, bytes of weights of a step."""

from typing import Any

from lowq_packers.arch.parts import (
    Attention,
    Experts,
    GatedDelta,
    LatentAttention,
    Linear,
    Mamba2,
    Model,
    Router,
    mixers,
    walk,
)


def weights(mixer: Any) -> tuple[float, float]:
    """Weights of a mixer that a token is multiplied by: of packed matrices, and of routers, which stay in 16 bits."""
    packed, routers = 0.0, 0.0
    for part in walk(mixer):
        if isinstance(part, Linear):
            packed += sum(part.rows) * part.columns
        elif isinstance(part, Router):
            routers += part.experts * part.hidden
        elif isinstance(part, Experts):
            packed += (2 + part.gated) * part.inner * part.hidden * part.router.top_k
    return packed, routers


def mixed(mixer: Any, tokens: int) -> float:
    """Operations of a mixer over a prompt besides its matrices: scores and sums of attention, updates of a recurrent state."""
    window = min(getattr(mixer, "window", 0) or tokens, tokens)
    pairs = window * tokens - window * (window - 1) / 2  # a token sees itself and those before it
    if isinstance(mixer, Attention):
        return 4.0 * mixer.heads * mixer.dim * pairs
    if isinstance(mixer, LatentAttention):
        return 2.0 * mixer.heads * (mixer.nope + mixer.rotated + mixer.v_dim) * pairs
    if isinstance(mixer, GatedDelta):  # what the state holds for k, its update, what it gives for q
        return 6.0 * mixer.v_heads * mixer.k_dim * mixer.v_dim * tokens
    if isinstance(mixer, Mamba2):
        return 4.0 * mixer.heads * mixer.dim * mixer.N * tokens
    return 0.0


def flops(model: Model, tokens: int) -> float:
    """Operations until the first token of a prompt; the head computes one row."""
    each = sum(2 * sum(weights(mixer)) * tokens + mixed(mixer, tokens) for _, mixer in mixers(model))
    return each + 2 * model.vocab * model.hidden


def step_bytes(model: Model, group: int) -> float:
    """Bytes of weights that a step of one sequence reads: matrices of 4 bits with a 16-bit scale a group, a 16-bit head."""
    packed, routers = (sum(of) for of in zip(*(weights(mixer) for _, mixer in mixers(model)), strict=True))
    return packed * (0.5 + 2 / group) + 2 * routers + 2 * model.vocab * model.hidden
