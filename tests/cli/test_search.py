"""The search in whole steps keeps configs that make the step shorter, one call at a time, and restores dispatch."""

from types import SimpleNamespace

import pytest
import torch

from lowq_cli.engine import search
from lowq_cli.quantizers import rtn
from lowq_kernels.dispatch import registry
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    layers = [QuantLinear.from_quantized(rtn.quantize(torch.randn(n, 64), Scheme(4, 32))) for n in (32, 96, 96)]
    return SimpleNamespace(linears=torch.nn.ModuleList(layers))


def test_calls_are_those_of_the_layers_the_heaviest_first(decoder):
    calls = search.calls_of(decoder, 2, torch.bfloat16)
    assert [(c.M, c.N, c.K) for c in calls] == [(2, 96, 64), (2, 32, 64)]


def test_search_keeps_options_that_help_together(decoder):
    now = dict.fromkeys(search.calls_of(decoder, 1, torch.bfloat16), ("a", {}))
    wide, narrow = now
    price = {("a", "a"): 10.0, ("b", "a"): 9.0, ("c", "a"): 8.0, ("c", "b"): 8.5, ("c", "c"): 7.0}

    def step_us(decoder):
        names = tuple(registry.TABLES[0](call)[0] for call in (wide, narrow))
        if "d" in names:
            raise UnsupportedError("does not fit")
        return price[names]

    options = {wide: [("b", {}), ("c", {}), ("d", {})], narrow: [("b", {}), ("c", {})]}
    tables = list(registry.TABLES)
    chosen, before, after = search.search(decoder, now, options, measure=step_us)
    assert (chosen, before, after) == ({wide: ("c", {}), narrow: ("c", {})}, 10.0, 7.0)
    assert tables == registry.TABLES
    trials = iter([True, False, False, False, False])
    assert search.search(decoder, now, options, lambda: next(trials), step_us)[2] == 9.0


@pytest.mark.parametrize("trials", [0, 2])
def test_a_gpu_that_is_lost_ends_the_search_and_leaves_dispatch_as_it_was(decoder, trials):
    """Counted as a slow config, a lost GPU would make all later trials slow and keep the configs chosen so far."""
    now = dict.fromkeys(search.calls_of(decoder, 1, torch.bfloat16), ("a", {}))
    timed = []

    def step_us(decoder):
        if len(timed) == trials:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        timed.append(1)
        return 10.0 - len(timed)

    tables = list(registry.TABLES)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        search.search(decoder, now, {call: [("b", {}), ("c", {})] for call in now}, measure=step_us)
    assert len(timed) == trials
    assert tables == registry.TABLES
