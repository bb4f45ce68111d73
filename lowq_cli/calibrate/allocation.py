"""Which scheme each group of weights gets within a budget of bytes, so that the sum of their errors is least.

A multiple-choice knapsack, solved exactly: a price per byte (Lagrange) gives a bound and a first solution; dynamic programming
then searches only what that bound leaves open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowq_packers.errors import UsageError


@dataclass(frozen=True)
class Choice:
    """One way to store a group of weights: the choice itself, its bytes, and the error that it adds."""

    what: Any
    nbytes: int
    error: float


def allocate(groups: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """One choice per group: bytes sum to at most `budget` and the sum of errors is least; of equal sums, the smallest in bytes.

    Raises UsageError if even the smallest choices do not fit, naming the least budget that does.
    """
    useful = {name: _front(choices) for name, choices in groups.items()}
    least = sum(c[0].nbytes for c in useful.values())
    if least > budget:
        raise UsageError(f"the smallest choice of every weight takes {least} bytes together, more than {budget}")
    tables = [(np.array([c.nbytes for c in cs], float), np.array([c.error for c in cs])) for cs in useful.values()]
    price = _price(tables, budget)
    picks = [int(np.argmin(errors + price * sizes)) for sizes, errors in tables]
    picks = _search(tables, budget, price, _fill(tables, budget, picks))
    return {name: cs[p] for (name, cs), p in zip(useful.items(), picks, strict=True)}


def _front(choices: Sequence[Choice]) -> list[Choice]:
    """The Pareto-optimal choices (no other has both fewer bytes and less error), in order of bytes."""
    front: list[Choice] = []
    for c in sorted(choices, key=lambda c: (c.nbytes, c.error)):
        if not front or c.error < front[-1].error:
            front.append(c)
    return front


Tables = list[tuple[np.ndarray, np.ndarray]]  # per group: bytes and errors of its choices


def _price(tables: Tables, budget: int) -> float:
    """The least price per byte at which every group's cheapest choice (error + price x bytes) fits the budget, by bisection."""

    def fits(price: float) -> bool:
        return sum(sizes[np.argmin(errors + price * sizes)] for sizes, errors in tables) <= budget

    if fits(0.0):
        return 0.0
    low = high = 1e-30
    while not fits(high):
        low, high = high, high * 4
    for _ in range(200):
        if (middle := (low * high) ** 0.5) in (low, high):
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _fill(tables: Tables, budget: int, picks: list[int]) -> list[int]:
    """The picks, improved with the bytes left in the budget: the upgrade that saves most error per byte comes first."""
    left = budget - sum(sizes[p] for (sizes, _), p in zip(tables, picks, strict=True))
    while True:
        steps = [
            ((errors[p] - errors[q]) / (sizes[q] - sizes[p]), g, q)
            for g, ((sizes, errors), p) in enumerate(zip(tables, picks, strict=True))
            for q in range(p + 1, len(sizes))
            if sizes[q] - sizes[p] <= left
        ]
        if not steps:
            return picks
        _, g, q = max(steps)
        left -= tables[g][0][q] - tables[g][0][picks[g]]
        picks[g] = q


def _search(tables: Tables, budget: int, price: float, known: list[int]) -> list[int]:
    """The best picks: a sum of errors is the bound + the picks' excess over it + price x bytes left, so excess is limited."""
    excess = [e + price * s - (e + price * s).min() for s, e in tables]
    priced = sum(float((e + price * s).min()) for s, e in tables)
    gap = sum(float(e[p]) for (_, e), p in zip(tables, known, strict=True)) - priced + price * budget
    gap += 1e-9 * (priced + price * budget)  # rounding
    rest = np.append(np.cumsum([s[0] for s, _ in reversed(tables)])[::-1], 0.0)  # least bytes from a group on
    size, error, over = np.zeros(1), np.zeros(1), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for g, (sizes, errors) in enumerate(tables):
        total = (size[:, None] + sizes).ravel()
        sums = (error[:, None] + errors).ravel()
        overs = (over[:, None] + excess[g]).ravel()
        keep = np.flatnonzero((total + rest[g + 1] <= budget) & (overs <= gap))
        keep = keep[np.lexsort((sums[keep], total[keep]))]
        best = np.minimum.accumulate(sums[keep])
        keep = keep[np.append(True, sums[keep][1:] < best[:-1])]  # keep a state only if no smaller one has as little error
        size, error, over = total[keep], sums[keep], overs[keep]
        trail.append((keep // len(sizes), keep % len(sizes)))
    at, picks = len(error) - 1, []
    for parents, chosen in reversed(trail):
        picks.append(int(chosen[at]))
        at = int(parents[at])
    return picks[::-1]
