"""Fits a table to a weight: the values with the least error when each weight / scale is rounded to the nearest value."""

from functools import cache
from typing import Any

import torch

from lowq_cli.quantizers._table_book import TINY, Book, divisor
from lowq_kernels.optional import optional
from lowq_packers.scheme import Scheme
from lowq_packers.tables import E4M3_MAX, FIXED, signed

SAMPLE = 1 << 20  # max. weights that a table is fitted to: whole rows at equal distances
ROUNDS = 3  # rounds: each fits a table to weights / scales, with the best scales for the previous table
BINS = 8192  # bins over -REACH .. REACH of weights / scales: Lloyd's iterations read the histogram
REACH = 2.0
ITERATIONS = 100  # Lloyd's iterations: in the last one 2**4 values move by less than 1e-4 of their range


def companion_of(W: torch.Tensor, scheme: Scheme) -> torch.Tensor | None:
    """The table or factor (`Companion.result`) of a whole weight (N, K); None for schemes that have neither."""
    if not scheme.table_width:
        return None
    seen = Companion(scheme, *W.shape)
    seen.see(W)
    return seen.result().to(W.device)


class Companion:
    """Finds the table or factor of a whole weight (N, K): call `see` with all rows in order, in slabs, then `result`.

    The largest magnitude of a fitted table is 1; with e4m3 scales the table is multiplied by their factor.
    """

    def __init__(self, scheme: Scheme, N: int, K: int) -> None:
        self.scheme, self.most, self.rows = scheme, 0.0, 0
        self.step = max(1, -(-N * K // SAMPLE))
        self.samples: list[torch.Tensor] = []

    def see(self, W: torch.Tensor) -> None:
        """Add the next rows (R, K)."""
        if W.numel():
            self.most = max(self.most, float(W.abs().max()))
        if self.scheme.table == "fitted":
            self.samples.append(W[-self.rows % self.step :: self.step].float())
            self.rows += W.shape[0]

    def result(self) -> torch.Tensor:
        """A table (1, 2**bits), or a factor (1, 1) with which the largest scale is e4m3's maximum; fp32. NaN in, NaN out."""
        fitted = self.scheme.table == "fitted"
        reach = E4M3_MAX * (1.0 if fitted else max(map(abs, FIXED[self.scheme.table])))
        # compressed-tensors stores the reciprocal, which must be finite
        factor = 1 / (reach / torch.tensor([[self.most]])).clamp(max=1 / torch.finfo(torch.float32).smallest_normal)
        if not fitted:
            return factor
        table = _fit(torch.cat(self.samples), self.scheme)
        return table * factor.to(table.device) if self.scheme.scale == "e4m3" else table


def _fit(W: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """A table (1, 2**bits) of largest magnitude 1 for rows (R, K)."""
    free = Scheme(scheme.bits, scheme.group_size, "none", "fitted")  # scales are not rounded during the fit
    groups = W.reshape(W.shape[0], -1, scheme.group_size)
    mirrored = signed(scheme)
    scales = groups.abs().amax(-1)
    if mirrored:  # the largest weight of each group lies on the table's positive side
        scales = torch.where(groups.amax(-1) + groups.amin(-1) < 0, -scales, scales)
    even = table = torch.linspace(-1, 1, scheme.levels, device=W.device)
    for i in range(ROUNDS):
        mass, moment = _histogram(groups, scales)
        start = _by_density(mass, scheme.levels) if i == 0 else table
        table = _lloyd(start, mass, moment)
        if not (most := table.abs().amax()) > 0:  # nothing to fit: all weights are 0 (or NaN, which `quantize` refuses)
            return even.unsqueeze(0)
        table = table / most
        book = Book(free, table.unsqueeze(0), W.device, None, mirrored)
        if i < ROUNDS - 1:
            scales = book.search(groups)[1]
    return table.unsqueeze(0)


def _histogram(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per bin of weights / scales: the sum of scale^2 (the cost of an error), and the sum of scale^2 * weight / scale."""
    wide = divisor(scales).unsqueeze(-1)
    over = groups / wide
    bins = ((over / REACH + 1) * (BINS / 2)).long().clamp_(0, BINS - 1).flatten()
    cost = wide.double().square().expand_as(over)
    return tuple(
        torch.zeros(BINS, dtype=torch.float64, device=groups.device).index_add_(0, bins, t.flatten())
        for t in (cost.contiguous(), cost * over)
    )  # type: ignore[return-value]


def _centres(device: torch.device) -> torch.Tensor:
    return ((torch.arange(BINS, dtype=torch.float64, device=device) + 0.5) / (BINS / 2) - 1) * REACH


def _by_density(mass: torch.Tensor, levels: int) -> torch.Tensor:
    """Values spaced by the cube root of the density, the optimum for many values (Panter and Dite 1951)."""
    share = mass.pow(1 / 3).cumsum(0)
    quantiles = (torch.arange(levels, dtype=torch.float64, device=mass.device) + 0.5) / levels * share[-1]
    return _centres(mass.device)[torch.searchsorted(share, quantiles).clamp(max=BINS - 1)].float()


@cache
def implementation(device: str) -> Any:
    """The module of the kernel that iterates on a device of this type; None: torch does it."""
    return optional("lowq_kernels.gptq.lloyd_triton", "triton") if device == "cuda" else None


def _lloyd(table: torch.Tensor, mass: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Iterate: each value becomes the mean of the weights nearest to it (Lloyd 1957, 1982). Returns fp32, ascending."""
    values, centres = table.double().sort()[0], _centres(mass.device)
    zero = torch.zeros(1, dtype=torch.float64, device=mass.device)
    sums, moments = torch.cat([zero, mass.cumsum(0)]), torch.cat([zero, moment.cumsum(0)])
    if kernel := implementation(values.device.type):
        return kernel.lloyd_triton(values, sums, moments, ITERATIONS, REACH, TINY).float()
    for _ in range(ITERATIONS):
        ends = torch.searchsorted(centres, (values[1:] + values[:-1]) / 2)
        edges = torch.cat([torch.zeros_like(ends[:1]), ends, torch.full_like(ends[:1], BINS)])
        held = sums[edges].diff()
        values = torch.where(held > 0, moments[edges].diff() / held.clamp(min=TINY), values).sort()[0]
    return values.float()
