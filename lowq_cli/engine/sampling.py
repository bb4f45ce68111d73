"""Sampling: from logits (B, V) to each sequence's next token; on a GPU, only a prompt's first token waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from lowq_cli.engine.ranges import INT64, Range, check_ranges
from lowq_packers.errors import DamagedError
from lowq_packers.lazy import torch

LEAST = 1e-16  # min. setting: logits of 1e4 divided by it twice are still finite in fp32; infinite ones would draw token 0
Temperature = Annotated[float, Range(LEAST, 1 / LEAST, apart=0, apart_is="greedy")]
TopK = Annotated[int, Range(0, INT64, off=0, whole=True)]
TopP = Annotated[float, Range(0, 1, off=1)]
RepetitionPenalty = Annotated[float, Range(LEAST, 1 / LEAST, off=1)]
Seed = Annotated[int, Range(0, INT64, whole=True)]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. temperature 0 is greedy; top_k 0, top_p 1 and repetition_penalty 1 are off; top_p 0 keeps only the
    likeliest token.

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
        """Whether sampling is deterministic, without random numbers."""
        return self.temperature == 0


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative logits of the tokens `seen` (B, V) bool, as in Keskar et al. 2019."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def restrict(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits (B, V) fp32 with everything outside the top k, then outside the smallest set of mass top_p, at -inf.

    The most likely token always stays. Ties at the k-th place all stay.
    """
    V = logits.shape[-1]
    if not 0 < top_k < V and top_p >= 1:
        return logits
    if logits.is_cpu:
        return torch.stack([_restrict_on_cpu(row, top_k, top_p) for row in logits])
    top = torch.sort(logits, dim=-1, descending=True).values if top_p < 1 else torch.topk(logits, top_k, dim=-1).values
    floor = top[:, min(top_k, V) - 1, None] if top_k else top[:, -1:]
    if top_p < 1:
        truncated = top.masked_fill(top < floor, float("-inf"))
        p = truncated.softmax(-1)
        before = p.cumsum(-1) - p  # total probability of all likelier tokens
        out = (before >= top_p) | (p == 0)
        out[:, 0] = False  # the likeliest stays, however fp32 rounds top_p and the sum
        floor = truncated.masked_fill(out, float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < floor, float("-inf"))


def _restrict_on_cpu(row: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`restrict` for a row (V,) by numpy: it sorts 151,936 numbers in 0.4 ms of a core, where torch.sort takes 16."""
    import numpy as np  # imported here: it takes 60 ms, and commands that load no model read the settings above

    negated = -row.numpy()
    if top_p >= 1:
        least = np.partition(negated, top_k - 1)[top_k - 1]
    else:
        ordered = np.sort(negated)
        if 0 < top_k < len(row):
            ordered = ordered[: np.searchsorted(ordered, ordered[top_k - 1], side="right")]
        with np.errstate(invalid="ignore"):  # infinite logits
            shares = np.exp(ordered[0] - ordered)
        mass = shares.cumsum(dtype=np.float64)
        inside = 1 + np.searchsorted(mass, top_p * mass[-1])
        least = ordered[min(inside, max(1, np.count_nonzero(shares))) - 1]
    return torch.from_numpy(np.where(negated > least, np.float32(-math.inf), -negated))


def drawable(logits: torch.Tensor) -> torch.Tensor:
    """(B,) bool for logits (B, V): whether the largest logit of each row is finite, so that a draw is meaningful."""
    return logits.amax(-1).isfinite()


def not_finite(dtype: torch.dtype) -> DamagedError:
    """The error message for logits that are not `drawable`, of a model that computes in `dtype`."""
    why = f"weights or activations overflow {str(dtype).removeprefix('torch.')}"
    return DamagedError(
        f"the model's output is NaN or infinite: {why}; try lowq quantize MODEL --dtype DTYPE, or fetch the model again"
    )


def check_finite(logits: torch.Tensor) -> None:
    """Raise DamagedError for a row of logits (B, V) that is not `drawable`: it always draws token 0. Waits for the device."""
    if not bool(drawable(logits).all()):
        raise not_finite(logits.dtype)


class Sampler:
    """The sampling state of B sequences, on the device at fixed addresses, so that a CUDA graph can use it.

    Args:
        choose: the decode operation that draws (`lowq_kernels.decode.ops`).
        V: the number of logits per token.
    Attributes:
        token: (B,) int64, the newest token of each sequence; pos: (B,) int32, its position.
        logits: (B, V), from which the newest tokens were drawn, before any penalty.
        seen: (B, V) bool, the tokens that the repetition penalty applies to; allocated at the first penalty.
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
        """The tensors that `choose` writes."""
        return [self.token, self.pos, *([] if self.seen is None else [self.seen])]

    def start(self, sampling: Sampling, ids: torch.Tensor, real: torch.Tensor) -> None:
        """Start new sequences with prompts `ids` (B, T) int64, padded where `real` (B, T) is False; both on the CPU."""
        self.sampling = sampling
        self.seed.fill_(sampling.seed)
        self.pos.copy_(real.sum(-1))
        if sampling.repetition_penalty != 1:
            if self.seen is None:
                self.seen = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            rows = torch.arange(self.shape[0])[:, None].expand_as(ids)
            self.seen.zero_()[rows[real].to(self.device), ids[real].to(self.device)] = True

    def choose(self, logits: torch.Tensor, advance: int) -> None:
        """Draw `token` from logits (B, V) of any float dtype and add `advance` to `pos`; the same seed draws the same tokens.

        top-k, top-p and the penalty are torch operations; the draw is a decode operation. Raises DamagedError as
        `check_finite`; on a GPU only for a prompt's logits (`advance` 0), because the check waits for the device.
        """
        self.logits = logits
        if self._at_once:
            largest, drawn = logits.max(-1)
            self._check(largest.tolist())
            self.token.copy_(drawn)
            self.pos += advance
            return
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

    def follow(self, logits: torch.Tensor, drafts: Sequence[int]) -> list[int]:
        """The tokens that `choose` draws after rows (T, V) of the only sequence, up to the first that differs from the draft in
        the next row. drafts: the tokens of the rows after the first."""
        if not self._at_once:
            tokens = list[int]()
            for i in range(len(drafts) + 1):
                self.choose(logits[i : i + 1], advance=1)
                tokens.append(int(self.token))
                if tokens[i : i + 1] != list(drafts[i : i + 1]):
                    break
            return tokens
        largest, drawn = (t.tolist() for t in logits.max(-1))
        n = next((i for i, draft in enumerate(drafts) if drawn[i] != draft), len(drafts)) + 1
        self.logits = logits[n - 1 : n]
        self._check(largest[:n])
        self.token.fill_(drawn[n - 1])
        self.pos += n
        return drawn[:n]

    @property
    def _at_once(self) -> bool:
        """Whether a draw is the largest logit of a row on a CPU: torch finds its place together with its value in 7 us of 8,192
        logits in bf16, where argmax alone takes 27."""
        return self.device.type == "cpu" and self.sampling.greedy and self.sampling.repetition_penalty == 1

    def _check(self, largest: Sequence[float]) -> None:
        if not all(map(math.isfinite, largest)):
            raise not_finite(self.logits.dtype)
