"""While a checkpoint is written, the kernels that will decode it are compiled: of its shapes, each kind of layer."""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from lowq_cli.engine import native_loader
from lowq_cli.engine import precompiling as engine_precompiling
from lowq_cli.engine.drafts.drafting import WIDTHS
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.engine.parallel_read import Blank
from lowq_cli.engine.sampling import Sampling
from lowq_cli.engine.steps import AddNorm, Product
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run.prepare import prepare
from lowq_cli.serving import cache_allocator, precompiling
from lowq_kernels.dispatch.registry import select
from lowq_kernels.modules.linear import QuantLinear

CPU = torch.device("cpu")


def planned(folder, **recipe):
    """The model that kernels are compiled with for the demo's plan, and the plan."""
    with prepare("demo", make_recipe(None, **recipe), folder, "cpu") as prepared:
        source = precompiling.stand_in(prepared.source, prepared.plan, folder)
        return native_loader.read(source, CPU, Blank), prepared.plan


def test_one_layer_of_each_kind_and_two_of_the_first(tmp_path):
    """The first layer's norm has no update of the stream before it, so a product that the norm is fused into needs a second."""
    uniform, plan = planned(tmp_path)
    assert len(uniform.linears["layers"]) == 2
    steps = NativeDecoder(uniform).plan.steps
    fused = {
        after.role
        for step, after in pairwise(steps)
        if isinstance(step, AddNorm) and not step.first and isinstance(after, Product)
    }
    assert fused == {"qkv", "gate_up"}
    assert uniform.linears["layers"][0]["o"].scheme == next(i.scheme for i in plan.items if "o_proj" in i.name)
    mixed, plan = planned(tmp_path, overrides=["layers.2.mlp.down_proj=8", "layers.3.mlp.down_proj=8"])
    assert len(plan.items) > 4 * len(uniform.linears["layers"])
    assert [layer["down"].scheme.bits for layer in mixed.linears["layers"]] == [4, 4, 8]


@contextmanager
def products():
    """A set of (rows of x, out_features), filled with those of the packed layers that run inside."""
    seen = set()

    def note(layer, args):
        if isinstance(layer, QuantLinear):
            seen.add((args[0].shape[0], layer.out_features))

    watching = register_module_forward_pre_hook(note)
    yield seen
    watching.remove()


def test_everything_that_decoding_takes_is_launched(tmp_path):
    model, _ = planned(tmp_path)
    with torch.inference_mode(), products() as seen:
        for launch in precompiling.launches(model):
            launch()
    layer = model.linears["layers"][0]
    for rows in (1, 2, 16, 128, 512, 4096):  # of a text's step, of a server's, of prompts
        assert {m.out_features for m in layer.values()} <= {N for M, N in seen if rows == M}


@pytest.mark.parametrize("act", ["none", "fp8"])
def test_kernels_of_long_prompts_are_loaded_where_layers_round_to_fp8(act, tmp_path, monkeypatch):
    """No pass without sequences launches them."""
    asked, loaded = [], []

    def find(call):
        asked.append(call)
        return SimpleNamespace(load=lambda *given: loaded.append(given)), {}

    monkeypatch.setattr(cache_allocator, "find", find)
    model, _ = planned(tmp_path, act=act)
    with torch.inference_mode():
        for launch in precompiling.launches(model):
            launch()
    assert loaded == [(call, CPU) for call in asked]
    assert len(asked) == (act == "fp8")
    for call in asked:  # on a Hopper GPU, for a model of longer texts and larger heads
        hopper = replace(call, device="cuda", capability=(9, 0), D=128, units=512)
        assert (call.units, select(hopper)[0].name) == (8, "cuda/prompt8")  # 1,024 tokens
        assert select(hopper)[0].load is not None


def test_steps_that_check_drafts_are_launched_ahead(tmp_path):
    model, _ = planned(tmp_path)
    decoder, seen = NativeDecoder(model), set()
    decoder.drafts = True
    ops_of_plan = decoder.plan.ops
    attend = ops_of_plan.attend_rows
    watched = lambda *a, groups: seen.add((a[0].shape[0], groups[2])) or attend(*a, groups=groups)  # noqa: E731
    decoder.plan.ops = replace(ops_of_plan, attend_rows=watched)
    met = set()
    with torch.inference_mode(), products() as launched:
        for launch in engine_precompiling.launches(model, decoder, 1, 5, Sampling(), met):
            launch()
    assert set(WIDTHS["cuda"]) <= {M for M, _ in launched}
    assert seen == {(T, T) for T in WIDTHS["cuda"]}
    assert not engine_precompiling.launches(model, decoder, 1, 5, Sampling(), met)  # once


def test_nothing_begins_once_it_is_stopped():
    begun = []
    precompiling.launch_unless(lambda: True, lambda: begun.append(1))
    precompiling.launch_unless(lambda: False, lambda: begun.append(2))
    assert begun == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_first_text_after_quantize_compiles_nothing(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "triton")

    def lowq(*words):
        subprocess.run([Path(sys.executable).with_name("lowq"), *words], env=env, check=True, capture_output=True)
        return {p for kind in ("cache/lowq/cubin/*", "triton/*/*.cubin") for p in tmp_path.glob(kind)}

    # distill: long enough for all kernels of so small a model
    before = lowq(
        "quantize", "demo", "--method", "distill", "--calib", "bundled", "--group", "32", "--out", str(tmp_path / "demo")
    )
    assert before
    for prompt in ("Once", "Once upon a time there was a child who"):
        assert lowq("generate", str(tmp_path / "demo"), "--prompt", prompt, "--max-new-tokens", "8") == before
