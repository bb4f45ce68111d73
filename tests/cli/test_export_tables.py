"""Weights of tables through the command line: quantized and exported at once, opened, imported, inspected, exported again."""

import json

import pytest
import torch
from folders import write_tokenizer
from safetensors.torch import load_file

from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.importer import runnable
from lowq_cli.interop.inspection import inspect_model
from lowq_cli.run.pipeline import quantize
from lowq_packers.errors import DamagedError, UnsupportedError

CASES = [("nvfp4", "compressed-tensors"), ("mxfp4", "compressed-tensors"), ("nvfp4", "modelopt")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def packed(family_checkpoints, tmp_path):
    def make(form, family="llama"):
        quantize(family_checkpoints(family).dense, tmp_path / form, format=form, method="rtn", lm_head="keep")
        return tmp_path / form

    return make


@pytest.mark.parametrize(("form", "to"), CASES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_export_is_imported_bit_for_bit_and_decodes_to_the_same(packed, tmp_path, form, to, family):
    folder, out = packed(form, family), tmp_path / "out"
    made = export(folder, to, out)
    write_tokenizer(out)
    result, expected = open_checkpoint(runnable(out)), open_checkpoint(folder)
    assert result.schemes == expected.schemes
    for t in expected.tensors:
        if t.scheme:
            a, b = result.read_matrix(next(u for u in result.tensors if u.name == t.name)), expected.read_matrix(t)
            assert torch.equal(a.dequantize(), b.dequantize()), t.name
            with open_decoded(out) as source:
                exact = b.dequantize(torch.float32 if form == "nvfp4" else torch.bfloat16)  # the model is in fp32
                assert torch.equal(source.read(f"{t.name}.weight").reshape(t.shape), exact), t.name
    rows = [r for r in inspect_model(str(out)).rows if r.quantized]
    assert {(r.bits, r.scheme) for r in rows} == {(4, f"{form} g{16 if form == 'nvfp4' else 32}")}
    if form == "nvfp4":
        assert any("different factors" in note for note in made.notes)
        assert "vLLM" not in made.engines
    export(runnable(out), to, tmp_path / "again")
    first, second = (load_file(f / "model.safetensors") for f in (out, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n].flatten().view(torch.uint8), second[n].flatten().view(torch.uint8)) for n in first)


@pytest.mark.parametrize("to", ["gptq", "mlx", "humming"])
def test_formats_without_tables_refuse_by_name(packed, tmp_path, to):
    with pytest.raises(UnsupportedError, match="holds no values of the table e2m1"):
        export(packed("nvfp4"), to, tmp_path / "out")


def test_modelopts_second_file_adds_to_config_json(packed, tmp_path):
    folder, out = packed("nvfp4"), tmp_path / "out"
    export(folder, "modelopt", out)
    config = json.loads((out / "config.json").read_text())
    section = config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    with open_decoded(out) as source, open_checkpoint(folder).source:
        t = next(t for t in open_checkpoint(folder).tensors if t.scheme)
        expected = open_checkpoint(folder).read_matrix(t).dequantize()
        assert torch.equal(source.read(f"{t.name}.weight").reshape(t.shape), expected)
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": {**section, "quant_algo": "FP8"}}))
    with pytest.raises(DamagedError, match=r"says quant_algo=W4A16_NVFP4, config.json FP8"):
        open_decoded(out)
