"""The allocation is the best there is, held against trying everything."""

import itertools
import random
import time

import pytest

from lowq_cli.calibrate.allocation import Choice, allocate
from lowq_packers.errors import UsageError


def tables(seed, groups, choices, coarse=False):
    r = random.Random(seed)
    made = {}
    for g in range(groups):
        scale = 10 ** r.uniform(-2, 1)
        sizes = [r.randrange(1, 12) * 8 if coarse else r.randrange(1, 4000) for _ in range(choices)]
        made[f"g{g}"] = [Choice(i, s, scale * 4 ** (-s / 400) * r.uniform(0.7, 1.4)) for i, s in enumerate(sizes)]
    return made


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_better(seed, coarse):
    groups = tables(seed, 5, 6, coarse)
    least = sum(min(c.nbytes for c in cs) for cs in groups.values())
    most = sum(max(c.nbytes for c in cs) for cs in groups.values())
    for share in (0, 0.1, 0.35, 0.7, 1):
        budget = int(least + share * (most - least))
        result = allocate(groups, budget)
        assert sum(c.nbytes for c in result.values()) <= budget
        every = (p for p in itertools.product(*groups.values()) if sum(c.nbytes for c in p) <= budget)
        best = min(sum(c.error for c in p) for p in every)
        assert sum(c.error for c in result.values()) == pytest.approx(best, rel=1e-9)


def test_a_large_model_takes_seconds():
    start = time.process_time()
    groups = tables(0, 400, 13)
    budget = int(1.2 * sum(min(c.nbytes for c in cs) for cs in groups.values()))
    result = allocate(groups, budget)
    assert sum(c.nbytes for c in result.values()) <= budget
    assert time.process_time() - start < 20


def test_a_budget_that_nothing_fits_is_named():
    with pytest.raises(UsageError, match="takes 30 bytes together, more than 29"):
        allocate({"a": [Choice(4, 10, 1.0), Choice(8, 20, 0.1)], "b": [Choice(4, 20, 1.0)]}, 29)
