"""Sampling: logits (B, V) -> the next token of each sequence, with no host synchronisation.

Drawing is Gumbel-style: argmax(p / e) with e ~ Exp(1) picks i with probability p[i] (the exponential race), so a draw is
elementwise work and an argmax, which a CUDA graph can hold; torch.multinomial cannot be captured.
"""

from dataclasses import dataclass

import torch

from lowq_packers.errors import UsageError

# The uniform numbers behind Exp(1) have 24 bits: one in 2^24 is exactly 0, and of 128k tokens one in 130 draws would meet
# it and win with any probability at all. Held at the spacing of those numbers, it wins only where p is of that order.
SMALLEST_RACE = 2.0**-24


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and repetition_penalty 1 are off.

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k} must be 0 (off) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1 (off)")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UsageError(f"repetition_penalty={self.repetition_penalty} must be positive; 1 is off")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"seed={self.seed} must be a whole number from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether no random number is drawn."""
        return self.temperature == 0


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative logits of tokens already `seen` (B, V) bool, as Keskar et al. 2019 do."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def restrict(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits (B, V) fp32 with everything outside the top k, then outside the smallest set of mass top_p, at -inf.

    The most likely token always stays. Ties at the k-th place all stay.
    """
    V = logits.shape[-1]
    if top_p < 1:
        found = torch.sort(logits, dim=-1, descending=True).values
    elif 0 < top_k < V:
        found = torch.topk(logits, top_k, dim=-1).values
    else:
        return logits
    floor = found[:, min(top_k, V) - 1, None] if top_k else found[:, -1:]
    if top_p < 1:
        kept = found.masked_fill(found < floor, float("-inf"))
        p = kept.softmax(-1)
        before = p.cumsum(-1) - p  # mass of everything likelier
        floor = kept.masked_fill((before >= top_p) | (p == 0), float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < floor, float("-inf"))


def pick(
    logits: torch.Tensor, s: Sampling, generator: torch.Generator | None, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """The next token (B,) int64 for logits (B, V) of any float dtype; the same seed draws the same tokens."""
    if seen is not None:
        logits = penalise(logits.float(), seen, s.repetition_penalty)
    if s.greedy:
        return logits.argmax(-1)
    logits = restrict(logits.float() / s.temperature, s.top_k, s.top_p)
    race = torch.empty_like(logits).exponential_(generator=generator).clamp_(min=SMALLEST_RACE)
    return (logits.softmax(-1) / race).argmax(-1)
