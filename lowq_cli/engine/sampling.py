"""Sampling: logits (B, V) -> the next token of each sequence, with no host synchronisation on a GPU after a prompt's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from lowq_cli.engine.ranges import INT64, Range, check_ranges
from lowq_packers.errors import DamagedError
from lowq_packers.lazy import torch

LEAST = 1e-16  # logits of 1e4 divided by it twice are still fp32 numbers; infinite ones would draw token 0
Temperature = Annotated[float, Range(LEAST, 1 / LEAST, apart=0, apart_is="greedy")]
TopK = Annotated[int, Range(0, INT64, off=0, whole=True)]
TopP = Annotated[float, Range(0, 1, off=1)]
RepetitionPenalty = Annotated[float, Range(LEAST, 1 / LEAST, off=1)]
Seed = Annotated[int, Range(0, INT64, whole=True)]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and repetition_penalty 1 are off; top_p 0
    leaves the likeliest token alone.

    Raises UsageError for a value out of range.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_ranges(self)

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
        out = (before >= top_p) | (p == 0)
        out[:, 0] = False  # whatever fp32 makes of top_p, and of the sum of all that is before
        floor = kept.masked_fill(out, float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < floor, float("-inf"))


def drawable(logits: torch.Tensor) -> torch.Tensor:
    """(B,) bool of logits (B, V): whether a draw from them means anything, the largest of each being a finite number."""
    return logits.amax(-1).isfinite()


def not_finite(dtype: torch.dtype) -> DamagedError:
    """What to say where a model's logits, computed in a dtype, are not `drawable`."""
    why = f"weights or activations overflow {str(dtype).removeprefix('torch.')}"
    return DamagedError(
        f"what the model computes is NaN or infinite: {why}; lowq quantize MODEL --dtype DTYPE takes another, or fetch it again"
    )


def check_finite(logits: torch.Tensor) -> None:
    """Raise DamagedError where a row of logits (B, V) is not `drawable`: every draw of it is token 0. Waits for the device."""
    if not bool(drawable(logits).all()):
        raise not_finite(logits.dtype)


class Sampler:
    """What sampling B texts side by side keeps on the device, always in the same place: a CUDA graph may hold it.

    Args:
        choose: the decode operation that draws (`lowq_kernels.decode.ops`).
        V: logits of a token.
    Attributes:
        token: (B,) int64, the newest of each text; pos: (B,) int32, its position.
        logits: (B, V), those that the newest tokens were drawn from, before any penalty.
        seen: (B, V) bool, tokens that the repetition penalty knows of; made at the first penalty.
    """

    def __init__(self, choose: Callable[..., None], B: int, V: int, device: torch.device) -> None:
        self._draw, self.shape, self.device = choose, (B, V), device
        self.sampling = Sampling()
        self.token = torch.zeros(B, dtype=torch.int64, device=device)
        self.pos = torch.zeros(B, dtype=torch.int32, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen: torch.Tensor | None = None

    @property
    def state(self) -> list[torch.Tensor]:
        """What `choose` writes."""
        return [self.token, self.pos, *([] if self.seen is None else [self.seen])]

    def start(self, sampling: Sampling, ids: torch.Tensor, real: torch.Tensor) -> None:
        """Other texts: prompts `ids` (B, T) int64, padded where `real` (B, T) is False; both on the CPU."""
        self.sampling = sampling
        self.seed.fill_(sampling.seed)
        self.pos.copy_(real.sum(-1))
        if sampling.repetition_penalty != 1:
            if self.seen is None:
                self.seen = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            rows = torch.arange(self.shape[0])[:, None].expand_as(ids)
            self.seen.zero_()[rows[real].to(self.device), ids[real].to(self.device)] = True

    def choose(self, logits: torch.Tensor, advance: int) -> None:
        """Write `token` for logits (B, V) of any float dtype and move `pos` on by `advance`; the same seed draws the same.

        Restrictions are torch operations, the draw itself is one of the decode ops. Raises DamagedError as `check_finite`: on a
        GPU for a prompt's (`advance` 0) alone, where nothing is waited for otherwise.
        """
        self.logits = logits
        if not advance or logits.device.type == "cpu":
            check_finite(logits)
        s, temperature = self.sampling, self.sampling.temperature
        seen = self.seen if s.repetition_penalty != 1 else None
        if seen is not None:
            logits = penalise(logits.float(), seen, s.repetition_penalty)
        if not s.greedy and (s.top_k or s.top_p < 1):
            logits, temperature = restrict(logits.float() / s.temperature, s.top_k, s.top_p), 1.0
        self._draw(logits.contiguous(), self.token, self.pos, self.seed, temperature, advance)
        if seen is not None:
            seen.scatter_(1, self.token[:, None], True)
