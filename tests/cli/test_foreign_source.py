"""Another tool's checkpoint as a source: its weights are decoded exactly, its traps are reported, no code in it is run."""

import json
import shutil

import pytest
import torch
from exported import FLOAT, HEAD, SYM, dense_tensors

import lowq
from lowq_cli.files.source import open_source
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import fetcher, foreign_matrices, open_decoded, open_foreign
from lowq_cli.interop.inspection import inspect_model
from lowq_packers.errors import DamagedError, UnsupportedError


@pytest.fixture(scope="module")
def gptq_folder(bf16_checkpoints, tmp_path_factory):
    out = tmp_path_factory.mktemp("gptq") / "out"
    export(bf16_checkpoints("llama", SYM | HEAD).packed, "gptq", out)
    return out


def test_quantize_takes_a_foreign_checkpoint(gptq_folder, bf16_checkpoints, tmp_path):
    """The same recipe on the foreign checkpoint and on the dense weights it stands for gives the same bytes."""
    folders = bf16_checkpoints("llama", SYM | HEAD)
    for name, model in (("foreign", gptq_folder), ("dense", folders.dequantized)):
        lowq.quantize(model, out=tmp_path / name, bits=3, group=32, skip=["layers.1.mlp.up_proj"])
    weights = [open_source(tmp_path / name) for name in ("foreign", "dense")]
    for name in weights[1].headers:
        a, b = (bytes(w.read_raw(name, 0, w.headers[name].nbytes)) for w in weights)
        assert a == b, name
    for w in weights:
        w.close()


def test_a_dry_run_reads_no_weights(gptq_folder, monkeypatch):
    from lowq_cli.interop import foreign
    from lowq_cli.plan.recipe import Recipe
    from lowq_cli.run import pipeline

    monkeypatch.setattr(foreign, "dense", lambda *_: pytest.fail("weights were read"))
    with pipeline.prepare(gptq_folder, Recipe(bits=4, group=32), headers_only=True) as prepared:
        assert prepared.plan.coverage > 0.5


def test_rows_of_a_decoded_matrix(gptq_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    with open_decoded(gptq_folder) as source:
        whole = source.read(name)
        N, K = source.headers[name].shape
        assert torch.equal(source.read(name, 3 * K, 2 * K), whole[3 * K : 5 * K])
        raw = source.read_raw(name, 2 * K, 40)
        assert bytes(raw) == bytes(whole.view(torch.uint8)[2 * K : 2 * K + 40].numpy())
        assert whole.numel() == N * K


def test_hqq_qmodel_is_a_source_and_a_pickle_of_code_is_not(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", FLOAT)
    export(folders.packed, "hqq", tmp_path / "st")
    qmodel = {}
    with open_foreign(tmp_path / "st") as source:
        fetch = fetcher(source)
        for name in source.headers:
            module, _, leaf = name.rpartition(".")
            value = fetch(name)
            if leaf in ("nbits", "group_size", "axis"):
                value = int(value)
            elif leaf in ("packing",):
                value = bytes(value.tolist()).decode()
            elif leaf in ("unpack_view_dtype", "compute_dtype"):
                value = getattr(torch, bytes(value.tolist()).decode().removeprefix("torch."))
            elif leaf == "shape":
                value = torch.Size(value.tolist())
            qmodel.setdefault(module, {})[leaf] = value
    folder = tmp_path / "hqq"
    folder.mkdir()
    config = json.loads((tmp_path / "st" / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(qmodel, folder / "qmodel.pt")
    with open_decoded(folder) as result, open_source(folders.dequantized) as expected:
        ours, theirs = dense_tensors(result), dense_tensors(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n].to(theirs[n].dtype), theirs[n]) for n in ours)
    assert inspect_model(str(folder)).format == "hqq"

    marker = tmp_path / "executed"

    class Hostile:
        def __reduce__(self):
            return (marker.write_text, ("x",))

    torch.save({"model": Hostile()}, folder / "qmodel.pt")
    with pytest.raises(UnsupportedError, match="does not run pickled code"):
        open_decoded(folder)
    assert not marker.exists()
    (folder / "qmodel.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedError, match="not a plain HQQ checkpoint"):
        open_decoded(folder)


def test_unsupported_formats_and_contradictory_configs_are_refused(gptq_folder, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(gptq_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for q, error, message in [
        ({"quant_method": "exl3"}, UnsupportedError, "quantized as 'exl3'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, DamagedError, "lm_head"),
        ({"quant_method": "compressed-tensors"}, DamagedError, "no config_groups"),
        ({**config["quantization_config"], "bits": 2}, DamagedError, "64 codes of 2 bits need"),
        ({**config["quantization_config"], "checkpoint_format": "marlin"}, UnsupportedError, "checkpoint_format='marlin'"),
    ]:
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": q}))
        with pytest.raises(error, match=message):
            open_decoded(folder)


def test_traps_are_shown(gptq_folder):
    report = inspect_model(str(gptq_folder))
    assert any("version 1" in note for note in report.notes)
    assert "vLLM" in report.engines
    with open_source(gptq_folder) as source:
        fmt, matrices = foreign_matrices(source)
    assert fmt.name == "gptq"
    assert {m.bits for m in matrices} == {4, 8}
