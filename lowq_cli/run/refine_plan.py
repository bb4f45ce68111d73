"""The plan of improving another tool's file, shown before the work: what is read, how long it takes, what is written."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowq_cli import quantizers
from lowq_cli.calibrate.file_matrix import Given, GivenBlocks, GivenCodes, better
from lowq_cli.plan.plan import Plan
from lowq_cli.quantizers._block_search import quantize_blocks
from lowq_cli.quantizers.gptq import Moments
from lowq_cli.run.budget import Budget
from lowq_cli.run.prepare import Prepared
from lowq_cli.run.refined_file import RefinedFile
from lowq_packers.formats._gguf_blocks import BLOCK_KINDS
from lowq_packers.formats.gguf import SCHEMES

Make = Callable[[torch.Tensor], Given]
COLUMNS = 256  # of a sample that is timed; a type whose groups are longer takes one group
FEW, SAMPLE = 16, 1 << 18  # rows of the first sample; max. weights of the second
SHARE = 4  # a sample is at most this part of the weights: of a small model the samples took as long as the work


@dataclass(frozen=True)
class RefinePlan:
    """What a run reads and writes. rows: (type, matrices, weights) of what is improved; kept: tensors that stay as they are.

    text: a line about the calibration text. nbytes: of the file.
    """

    model: str
    out: Path
    rows: list[tuple[str, int, int]]
    kept: int
    nbytes: int
    text: str
    budget: Budget
    device: str


def refine_plan(prepared: Prepared, plan: Plan, file: RefinedFile, out: Path) -> RefinePlan:
    """The plan; the time of the file's types is measured on samples, which takes about half a second for each."""
    names: dict[str, list[str]] = {}
    for i in plan.items:
        if i.scheme:
            names.setdefault(file.kind(i.name), []).append(i.name)
    shapes = {n: shape for n, (shape, _) in file.matrices.items()}
    rows = [(kind, len(some), sum(shapes[n][0] * shapes[n][1] for n in some)) for kind, some in names.items()]
    on, budget = torch.device(str(prepared.workers[0])), prepared.budget
    if budget.seconds is not None:
        for some in names.values():
            smallest = min(some, key=lambda n: shapes[n][0] * shapes[n][1])
            budget = budget.longer(improving_s(*made_like(file.given(smallest)), [shapes[n] for n in some], on)[1])
    return RefinePlan(
        plan.source,
        out,
        sorted(rows, key=lambda r: -r[2]),
        len(plan.items) - sum(len(some) for some in names.values()),
        file.nbytes,
        text_line(prepared),
        budget,
        str(on),
    )


def text_line(prepared: Prepared) -> str:
    """The calibration text of a run as a line of its plan."""
    if prepared.own:
        return prepared.own.summary
    notes = [note for note in prepared.plan.notes if note.startswith("calibrated on")]
    return notes[0] if notes else f"calibrated on {prepared.plan.recipe.calib}, {prepared.plan.recipe.tokens:,} tokens"


def improving_s(make: Make, group: int, shapes: Sequence[tuple[int, int]], device: torch.device) -> tuple[float, float]:
    """Estimated seconds of making, by `make`, and of improving matrices of one type: so much per column and per weight.

    group: weights of a row that a sample must be a multiple of.
    """
    K = group * -(-COLUMNS // group)
    many = max(2 * FEW, _weights(shapes) // K)
    (_, few_s), (made_s, many_s) = (_timed(make, N, K, device) for N in (FEW, many))
    weight = max(0.0, many_s - few_s) / ((many - FEW) * K)
    column = max(0.0, few_s / K - FEW * weight)
    return made_s * sum(N * K for N, K in shapes) / (many * K), sum(K * (column + N * weight) for N, K in shapes)


def making_s(kind: str, shapes: Sequence[tuple[int, int]]) -> float:
    """Estimated seconds of rounding matrices to a type of GGUF on the CPU, from timing a sample."""
    make, group = made_as(kind)
    rows = max(FEW, _weights(shapes) // COLUMNS)
    W = torch.randn(rows, group * -(-COLUMNS // group), generator=torch.Generator().manual_seed(0))
    make(W[:FEW])  # warm-up
    began = time.perf_counter()
    make(W)
    return (time.perf_counter() - began) * sum(N * K for N, K in shapes) / W.numel()


def _weights(shapes: Sequence[tuple[int, int]]) -> int:
    """Weights of the sample for matrices of these shapes."""
    return min(SAMPLE, sum(N * K for N, K in shapes) // SHARE)


def _timed(make: Make, N: int, K: int, device: torch.device) -> tuple[float, float]:
    """Seconds of making and of improving a random matrix (N, K)."""
    g = torch.Generator().manual_seed(0)
    W, x = torch.randn(N, K, generator=g).to(device), torch.randn(2 * K, K, generator=g).to(device)
    moments = Moments(x.T @ x)
    began = time.perf_counter()
    start = make(W)
    made_s = time.perf_counter()
    better(W, start, moments)  # computes an error as a number, so it has waited for a GPU
    return made_s - began, time.perf_counter() - made_s


def made_like(given: Given) -> tuple[Make, int]:
    """The function that rounds weights to the type of a matrix, and the type's group."""
    if isinstance(given, GivenBlocks):
        return made_as(given.blocks.kind)
    assert isinstance(given, GivenCodes)
    scheme = given.q.scheme
    return (lambda W: GivenCodes(quantizers.get("rtn")(W, scheme, torch.float32))), scheme.group_size


def made_as(kind: str) -> tuple[Make, int]:
    """As `made_like`, for a type of GGUF by its name."""
    if kind in BLOCK_KINDS:
        return (lambda W: GivenBlocks(quantize_blocks(W, kind))), COLUMNS
    scheme = SCHEMES[kind]
    return (lambda W: GivenCodes(quantizers.get("rtn")(W, scheme, torch.float32))), scheme.group_size
