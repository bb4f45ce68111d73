"""Heads that predict further tokens: quantized like the layers, kept by exports, ignored by every reader."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from described import model as random_model

import lowq
from lowq_cli.engine import native_loader
from lowq_cli.engine.native import NativeDecoder
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.hf.load import load_model
from lowq_cli.interop.exporter import export
from lowq_cli.interop.importer import runnable
from lowq_cli.plan.planner import make_plan
from lowq_cli.plan.recipe import make_recipe

RECIPE = {"bits": 8, "group": "channel", "method": "rtn", "zero": "none"}


def nextn(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeepSeek's layer beyond the last: a copy of the last, and what joins it to the model."""
    last = {n.replace("layers.3.", "layers.4."): t + 0.1 for n, t in tensors.items() if "layers.3." in n}
    own = {"enorm": torch.ones(64), "hnorm": torch.ones(64), "eh_proj": torch.randn(64, 128)}
    own |= {"embed_tokens": torch.randn(160, 64), "shared_head.norm": torch.ones(64), "shared_head.head": torch.randn(160, 64)}
    return last | {f"model.layers.4.{n}.weight": t for n, t in own.items()}


def mtp(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Qwen 3.5's: a layer of attention below mtp."""
    layer = {"mtp.layers.0." + n.partition("layers.3.")[2]: t + 0.1 for n, t in tensors.items() if "layers.3." in n}
    own = {"fc": torch.randn(64, 128), "norm": torch.ones(64), "pre_fc_norm_embedding": torch.ones(64)}
    return layer | {f"mtp.{n}.weight": t for n, t in (own | {"pre_fc_norm_hidden": torch.ones(64)}).items()}


CASES = {
    "deepseek_v3": (nextn, {"num_nextn_predict_layers": 1}, "model.layers.4.", ("eh_proj", "embed_tokens", "shared_head.head")),
    "qwen3_5_text": (mtp, {"linear_value_head_dim": 16}, "mtp.", ("fc",)),
}


@pytest.fixture(params=CASES)
def made(request, tmp_path):
    """(family, folder with its heads, the heads' tensors, their prefix, matrices of theirs that are kept)."""
    make, more, prefix, kept = CASES[request.param]
    folder = tmp_path / "dense"
    random_model(request.param, **more).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    extra = {n: t.contiguous() for n, t in make(tensors).items()}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    return request.param, folder, extra, prefix, kept


def test_they_go_through_quantize_inspect_generate_export_and_back(made, tmp_path, capfd):
    _, dense, extra, prefix, kept = made
    out = tmp_path / "packed"
    lowq.quantize(dense, out=out, **RECIPE)
    with open_source(str(dense)) as source:
        notes = make_plan(source, make_recipe(**RECIPE)).notes
    assert sum("heads that predict further tokens" in note for note in notes) == 1
    checkpoint = open_checkpoint(out)
    with checkpoint.source:
        held = {
            t.name if t.scheme else t.name.removesuffix(".weight"): t for t in checkpoint.tensors if t.name.startswith(prefix)
        }
        assert held.keys() == {n.removesuffix(".weight") for n in extra}
        for name, t in extra.items():
            one = held[name.removesuffix(".weight")]
            linear = t.dim() == 2 and not name.endswith((*(f"{k}.weight" for k in kept), ".gate.weight"))
            assert (one.scheme is not None) == linear, name
            values = checkpoint.read_matrix(one).dequantize() if one.scheme else checkpoint.read_plain(one)
            assert float((values.float() - t).norm() / t.norm()) < 0.02
    with open_source(str(out)) as source:
        expected = tokens(native_loader.read(source, torch.device("cpu")))
    exported = export(out, "compressed-tensors", tmp_path / "exported")
    assert not any("left out" in note for note in exported.notes)
    names = {n.partition(".weight")[0] for n in load_file(tmp_path / "exported" / "model.safetensors") if n.startswith(prefix)}
    assert names == {n.removesuffix(".weight") for n in extra} | {n for n in names if "bias" in n}
    with open_source(str(runnable(tmp_path / "exported"))) as source:
        assert {n.partition(".weight")[0] for n in source.headers if n.startswith(prefix)} == {
            t.name.removesuffix(".weight") for t in held.values()
        }
        assert tokens(load_model(source, "cpu", torch.bfloat16)) == expected
    with open_source(str(out)) as source:
        theirs = load_model(source, "cpu", torch.bfloat16)
    assert "does not know" not in capfd.readouterr().err
    assert tokens(theirs) == expected


def tokens(model) -> list[int]:
    """Eight tokens, the likeliest each time."""
    ids, decoder = [1, 5, 9], NativeDecoder(model)
    for _ in range(8):
        ids.append(int(decoder.logits(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def test_a_text_for_calibration_leaves_them_to_a_method_without(made):
    _, dense, _, prefix, _ = made
    with open_source(str(dense)) as source:
        plan = make_plan(source, make_recipe(bits=4, group="channel", method="gptq"))
    methods = {item.method for item in plan.items if item.scheme and item.name.startswith(prefix)}
    assert methods
    assert "gptq" not in methods
    assert "gptq" in {item.method for item in plan.items}


def test_formats_without_a_place_leave_them_out_with_a_word(made, tmp_path):
    family, dense, extra, _, _ = made
    if family == "deepseek_v3":
        pytest.skip("MLX holds no experts of this family")
    lowq.quantize(dense, out=tmp_path / "packed", bits=8, group=32, method="rtn")
    done = export(tmp_path / "packed", "mlx", tmp_path / "mlx", rounding=True)
    assert any(f"{len(extra)} tensors of heads that predict further tokens are left out" in note for note in done.notes)
    assert not any(n.startswith("mtp.") for n in load_file(tmp_path / "mlx" / "model.safetensors"))
