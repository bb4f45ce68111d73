"""Activation-aware scales: mappings are found and proved for each family, and change nothing but the weights' sizes."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from lowq_cli.calibrate import calibration, scaling
from lowq_cli.calibrate.layer_walk import Layer
from lowq_cli.files.source import open_source
from lowq_cli.hf import register
from lowq_cli.hf.layers import DecoderLayers
from lowq_cli.hf.scale_mappings import find
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.quantizers import awq, lsq
from lowq_cli.quantizers.gptq import Moments
from lowq_cli.run import pipeline
from lowq_packers.errors import SchemeError
from lowq_packers.scheme import ZERO_KINDS, Scheme

ATTENTION = ["input_layernorm -> self_attn.k_proj, self_attn.q_proj, self_attn.v_proj", "self_attn.v_proj -> self_attn.o_proj"]
MLP = ["post_attention_layernorm -> mlp.gate_proj, mlp.up_proj", "mlp.up_proj -> mlp.down_proj"]
FOLDS = {
    "llama": ATTENTION + MLP,
    "qwen2": ATTENTION + MLP,
    "qwen3": ATTENTION + MLP,
    "mistral": ATTENTION + MLP,
    "gemma3": [*ATTENTION, MLP[0].replace("post_attention", "pre_feedforward"), MLP[1]],
    "phi3": [
        "input_layernorm -> self_attn.qkv_proj", "self_attn.qkv_proj -> self_attn.o_proj",
        "post_attention_layernorm -> mlp.gate_up_proj", "mlp.gate_up_proj -> mlp.down_proj",
    ],
    "gpt2": ["ln_1 -> attn.c_attn", "ln_2 -> mlp.c_fc"],
    "mixtral": [*ATTENTION, "mlp.experts.up -> mlp.experts.down"],
    "qwen3-moe": [*ATTENTION, "mlp.experts.up -> mlp.experts.down"],
}  # fmt: skip


class Walked:
    """The second layer of a random model of a family, with inputs."""

    def __init__(self, folder):
        with open_source(folder) as source, torch.no_grad():
            self.blocks = DecoderLayers(source, torch.device("cpu"))
            ids = torch.arange(128).reshape(4, 32)
            self.hidden, others = self.blocks.start(ids, 2)
            self.spots = self.blocks.linears(1)
            self.weights = ExitStack()
            module = self.weights.enter_context(self.blocks.layer(1))
            self.layer = Layer(module, others[1], self.spots)
            self.dtypes = dict.fromkeys(self.blocks.kept(1), torch.bfloat16)


@pytest.mark.parametrize("family", FOLDS)
@torch.no_grad()
def test_scaling_leaves_the_layer_the_same_function(family, family_checkpoints):
    walked = Walked(family_checkpoints(family, schemes={}).dense)
    layer = walked.layer
    before = [layer.run(x, layer.original) for x in walked.hidden]
    result, _ = find(layer.module, walked.spots, lambda: layer.run(walked.hidden[0], layer.original))
    assert sorted(dict.fromkeys(f.label for f in result)) == sorted(FOLDS[family])
    untouched = {n: layer.matrix(n, layer.original).clone() for n in walked.spots}
    for mapping in result:
        assert scaling.is_exact(layer, mapping, walked.hidden[0], walked.dtypes)
    for n, W in untouched.items():  # the proof takes its scales back, bit for bit
        assert torch.equal(layer.matrix(n, layer.original), W)
    done = scaling.scale(layer, walked.hidden, dict.fromkeys(walked.spots, Scheme(2, 16)), walked.dtypes, 8)
    assert done.columns
    assert any(float((c - 1).abs().max()) > 0.1 for c in done.columns.values())
    after = [layer.run(x, layer.original) for x in walked.hidden]
    for a, b, x in zip(after, before, walked.hidden, strict=True):
        bias = 2e-3 if family in ("gpt2", "qwen2") else 1e-5  # biases are rounded to bfloat16 again
        assert float((a - b).norm() / (b - x).norm()) < bias
    for n, W in untouched.items():
        scaled = W * done.columns.get(n, torch.ones(1)) * done.rows.get(n, torch.ones(1)).unsqueeze(-1)
        assert torch.allclose(layer.matrix(n, layer.original), scaled, rtol=1e-5)


@torch.no_grad()
def test_a_mapping_that_is_not_exact_is_left_out(family_checkpoints):
    walked = Walked(family_checkpoints("llama").dense)
    layer = walked.layer
    result, _ = find(layer.module, walked.spots, lambda: layer.run(walked.hidden[0], layer.original))
    (norm,) = [f for f in result if f.norm == "input_layernorm"]
    wrong = replace(norm, after=norm.after[:2])
    assert not scaling.is_exact(layer, wrong, walked.hidden[0], walked.dtypes)
    (values,) = [f for f in result if f.heads]
    assert values.heads == (2, 2, 16)
    assert not scaling.is_exact(layer, replace(values, heads=(1, 2, 32)), walked.hidden[0], walked.dtypes)
    mine = {n: s for n, s in walked.spots.items() if "k_proj" not in n}  # k is not quantized: the norm must stay
    rest = Layer(layer.module, layer.others, mine)
    done = scaling.scale(rest, walked.hidden, dict.fromkeys(mine, Scheme(2, 16)), walked.dtypes, 8)
    assert done.missing == ["self_attn.q_proj, self_attn.v_proj"]
    assert "input_layernorm.weight" not in done.kept


@pytest.mark.parametrize("family", FOLDS)
def test_an_awq_checkpoint_is_an_ordinary_one(family, family_checkpoints, text, tmp_path):
    if family in ("mixtral", "qwen3-moe"):
        family_checkpoints(family)  # skips where transformers cannot load packed experts
    dense = family_checkpoints(family, schemes={}).dense
    *events, finished = pipeline.run(dense, make_recipe(bits=8, group=16, method="awq", calib=text), tmp_path / "out")
    layers = [e for e in events if isinstance(e, calibration.LayerDone)]
    assert all(0 < e.error < 1e-3 for e in layers)
    result, expected = logits(tmp_path / "out"), logits(dense)
    by_token = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(by_token.median()) < 0.02  # of a mixture's tokens, a few go to other experts
    report = json.loads((tmp_path / "out" / "lowq_report.json").read_text())
    assert {t["method"] for t in report["tensors"] if "method" in t} == {"awq"}
    assert all(t["rel_error"] < 0.02 for t in report["tensors"] if "method" in t)
    assert finished.result.bytes == pipeline.quantize(dense, tmp_path / "free", bits=8, group=16)["bytes"]
    missing = {"mixtral": ("mlp.experts.gate_up_proj",), "gpt2": ("attn.c_proj", "mlp.c_proj")}
    assert layers[0].unscaled == missing.get(family.replace("qwen3-moe", "mixtral"), ())


def logits(folder):
    from transformers import AutoModelForCausalLM

    register()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(input_ids=torch.arange(96).reshape(3, 32)).logits


def test_a_rerun_continues_behind_the_finished_layers(family_checkpoints, text, tmp_path):
    dense = family_checkpoints("qwen2", "bfloat16").dense
    recipe = make_recipe(bits=3, group=16, method="awq", calib=text, rotate=True)
    list(pipeline.run(dense, recipe, tmp_path / "whole"))
    events = pipeline.run(dense, recipe, tmp_path / "out")
    while not isinstance(next(events), calibration.LayerDone):
        pass
    events.close()
    again = list(pipeline.run(dense, recipe, tmp_path / "out"))
    assert next(e for e in again if isinstance(e, calibration.LayerDone)).resumed
    for path in (tmp_path / "whole").iterdir():
        assert path.name == "lowq.log" or path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize("zero", ZERO_KINDS)
@pytest.mark.parametrize("bits", [4, 2])
def test_awq_minimises_the_weighted_error(bits, zero):
    g = torch.Generator().manual_seed(0)
    W, power = torch.randn(48, 128, generator=g), 10 ** (torch.rand(128, generator=g) * 3)
    scheme = Scheme(bits, 32, zero)
    result = awq.quantize(W, scheme, torch.bfloat16, Moments(torch.diag(power)))
    free = lsq.quantize(W, scheme, torch.bfloat16)
    error = [float(((q.dequantize() - W).square() * power).sum()) for q in (result, free)]
    assert error[0] < 0.9 * error[1]
    assert torch.equal(awq.quantize(W, scheme).W_q, lsq.quantize(W, scheme).W_q)
    with pytest.raises(SchemeError, match="moments are of 64 inputs"):
        awq.quantize(W, scheme, None, Moments(torch.eye(64)))


def test_buffers_that_are_no_floats_are_let_alone(family_checkpoints, text, tmp_path):
    from safetensors.torch import load_file, save_file

    dense = tmp_path / "dense"
    shutil.copytree(family_checkpoints("gpt2").dense, dense)
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}  # old GPT-2 files hold their causal masks
    save_file(load_file(dense / "model.safetensors") | mask, dense / "model.safetensors", metadata={"format": "pt"})
    events = list(pipeline.run(dense, make_recipe(bits=4, group=16, method="awq", calib=text), tmp_path / "out"))
    assert isinstance(events[-1], pipeline.Finished)
