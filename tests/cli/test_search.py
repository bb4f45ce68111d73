"""The search in whole steps keeps configs that make the step shorter, one call at a time, and restores dispatch."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "families"))
from folded import Fold

from lowq_cli.engine import folding, search
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.quantizers import rtn
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme

FOLDED = (folding.ProductAdd, folding.NormProduct, folding.ProductGate)


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    layers = [QuantLinear.from_quantized(rtn.quantize(torch.randn(n, 64), Scheme(4, 32))) for n in (32, 96, 96)]
    return SimpleNamespace(linears=torch.nn.ModuleList(layers), plan=SimpleNamespace(refold=lambda: None))


def packed_llama():
    config = AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for path, linear in list(model.model.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            q = rtn.quantize(linear.weight.data, Scheme(4, 32))
            model.model.set_submodule(path, QuantLinear.from_quantized(q, dtype=torch.float32))
    return model


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


def test_a_kernel_that_does_not_fold_is_timed_in_a_step_that_is_not_folded():
    """It once met the list folded for the kernel before it, raised UnsupportedError, and could never be chosen."""

    class Folding(Fold):
        """Folds only products that `dequant` computes."""

        @staticmethod
        def why_not(layer, M, dtype, fold):
            return "" if registry.select(call_of(layer, M, dtype))[0].name == "dequant" else "another kernel computes it"

    def call_of(layer, M, dtype):
        return Call.of(torch.empty(M, 0, dtype=dtype), layer.packed)

    def folded_us(decoder):
        folded = [step for step in decoder.plan.program(1) if type(step) in FOLDED]
        for step in folded:
            if why := Folding.why_not(step.layer, 1, torch.float32, 0):
                raise UnsupportedError(why)
        return 100.0 + len(folded)

    decoder = NativeDecoder(packed_llama())
    decoder.plan.ops = replace(decoder.plan.ops, fold=Folding)
    calls = search.calls_of(decoder, 1, torch.float32)
    now = dict.fromkeys(calls, ("dequant", {}))
    with registry.asking(now.get):
        decoder.plan.refold()
        before = folded_us(decoder)
    assert before > 100
    chosen, *us = search.search(decoder, now, {call: [("reference", {})] for call in now}, measure=folded_us)
    assert us == [before, 100.0]
    assert "reference" in {name for name, _ in chosen.values()}
    with registry.asking(now.get):
        assert folded_us(decoder) == before, "the list of a trial stays"
