"""Quantized draft heads, in a folder of their own and inside a checkpoint: they compute with the codes in the files."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import publishing as pub
from plain_torch import Eagle3
from test_heads import TEXT, WITH_MTP, guessed, inside, native, states_of, theirs
from typer.testing import CliRunner

import lowq
from lowq_cli import state
from lowq_cli.engine import heads
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.main import app
from lowq_kernels.modules.linear import QuantLinear

ROUND = {"group": 16, "method": "rtn"}


def values(folder):
    """Every tensor of a checkpoint as its codes say."""
    checkpoint = open_checkpoint(folder)
    with checkpoint.source:
        packed = {f"{t.name}.weight": checkpoint.read_matrix(t).dequantize().float() for t in checkpoint.tensors if t.scheme}
        kept = [t for t in checkpoint.tensors if not t.scheme and t.name not in ("d2t", "t2d")]
        return packed | {t.name: checkpoint.read_plain(t).float() for t in kept}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return pub.target(folder), native(folder)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_folder_of_a_head_is_quantized_and_run_as_its_codes_say(bits, llama, tmp_path):
    model, ours = llama
    tensors = pub.eagle3_tensors()
    pub.specforge(tmp_path / "dense", tensors)
    lowq.quantize(tmp_path / "dense", out=tmp_path / "packed", bits=bits, lm_head=bits, dtype="float32", **ROUND)
    plan = heads.load(str(tmp_path / "packed"), ours)
    packed = [m for m in plan.linears.modules() if isinstance(m, QuantLinear)]
    assert {m.scheme.bits for m in packed} == {bits}
    assert len(packed) == 6  # q, k, v as one; o; gate and up as one; down; the product of the features; the output head
    held = values(tmp_path / "packed") | {"d2t": tensors["d2t"]}
    config = {**pub.FLAT, "norm_before_residual": False}
    expected = Eagle3(held, config, model.model.embed_tokens.weight.detach())(
        TEXT[1:], [x[:-1] for x in theirs(model, (2, 3, 3))], 4
    )
    result = guessed(plan, TEXT[1:], [x[:-1] for x in states_of(ours, plan.layers)], 4)
    assert result[0] == expected[0]
    torch.testing.assert_close(result[1], expected[1], rtol=5e-3, atol=5e-3)


def test_the_command_names_the_use_of_a_packed_head_and_does_not_remember_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pub.specforge(tmp_path / "dense", pub.eagle3_tensors())
    shown = CliRunner().invoke(app, ["quantize", "dense", "--out", "packed", "--bits", "4"])
    assert shown.exit_code == 0, shown.output
    assert f"lowq generate MODEL --draft {tmp_path / 'packed'}," in shown.output.replace("\n", "")
    assert "tune" not in shown.output
    assert not any(k.checkpoint == (tmp_path / "packed") for k in state.known(lambda line: None))
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["draft_vocab_size"] == pub.GUESSES
    assert torch.equal(load_file(tmp_path / "packed" / "model.safetensors")["d2t"], pub.eagle3_tensors()["d2t"])


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3"])
def test_a_quantized_checkpoint_has_its_mtp_layer_and_runs_it(family, tmp_path):
    make, _, more = WITH_MTP[family]
    pub.target(tmp_path / "dense", family, **more)
    pub.with_heads(tmp_path / "dense", make, *([4] if make is pub.nextn else []))
    lowq.quantize(tmp_path / "dense", out=tmp_path / "packed", bits=8, dtype="float32", **ROUND)
    plan = inside(tmp_path / "packed", native(tmp_path / "packed"))
    dense = inside(tmp_path / "dense", native(tmp_path / "dense"))
    assert any(isinstance(m, QuantLinear) for m in plan.linears.modules())
    states = [x[:-1] for x in states_of(native(tmp_path / "dense"), plan.layers)]
    expected = guessed(dense, TEXT[1:], states, 1)[1]
    result = guessed(plan, TEXT[1:], [x.to(plan.dtype) for x in states], 1)[1]
    assert float((result.float() - expected).norm() / expected.norm()) < 0.05
