"""Checkpoints of other tools run as they are: imported once into the cache, with the logits of the weights they stand for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from exported import FLOAT, HEAD, INT4, SYM
from folders import write_tokenizer
from safetensors.torch import load_file, save_file

import lowq
from lowq_cli import main
from lowq_cli.files.checkpoint import is_checkpoint, open_checkpoint
from lowq_cli.files.folder import new_folder
from lowq_cli.interop import importer
from lowq_cli.interop.exporter import export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.importer import runnable
from lowq_packers import home
from lowq_packers.errors import DamagedError, UnsupportedError, UsageError

WHOLE = SYM | HEAD
CASES = [("gptq", WHOLE), ("gptq", INT4), ("awq", INT4), ("compressed-tensors", WHOLE), ("hqq", FLOAT), ("mlx", WHOLE)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def foreign(family_checkpoints, tmp_path):
    def make(to, schemes, family="llama"):
        folders = family_checkpoints(family, "float32", schemes)
        export(folders.packed, to, tmp_path / "model")
        write_tokenizer(tmp_path / "model")
        return tmp_path / "model", folders

    return make


@pytest.mark.parametrize(("to", "schemes"), CASES, ids=lambda v: v if isinstance(v, str) else v["mlp"].zero)
def test_codes_scales_and_zeros_arrive_bit_for_bit(foreign, to, schemes):
    folder, made = foreign(to, schemes)
    result, expected = open_checkpoint(runnable(folder)), open_checkpoint(made.packed)
    for t in expected.tensors:
        for leaf in ("", ".weight", ".weight_scale", ".weight_zero"):
            name = t.name + leaf
            if name in expected.source.headers and name in result.source.headers:
                assert torch.equal(result.source.read(name), expected.source.read(name)), name
    kinds = {n: (s.bits, s.group_size) for n, s in expected.schemes.items()}
    assert {n: (s.bits, s.group_size) for n, s in result.schemes.items()} == kinds
    if to not in ("mlx", "hqq"):
        assert result.schemes == expected.schemes


def test_the_logits_are_those_of_the_dense_weights(foreign):
    from transformers import AutoModelForCausalLM

    folder, made = foreign("gptq", INT4)
    model, _ = lowq.load(folder, device="cpu", dtype="float32")
    dense = AutoModelForCausalLM.from_pretrained(made.dequantized).eval()
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.inference_mode():
        ours, theirs = model(ids).logits, dense(ids).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_it_is_imported_once(foreign, capsys):
    folder, _ = foreign("awq", INT4)
    first = runnable(folder)
    assert "importing it into" in capsys.readouterr().err
    weights = Path(first) / "model.safetensors"
    inode = weights.stat().st_ino
    assert runnable(folder) == first
    assert weights.stat().st_ino == inode
    assert capsys.readouterr().err == ""


def test_a_changed_checkpoint_is_another_import(foreign):
    folder, _ = foreign("awq", INT4)
    first = runnable(folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("qweight"))
    tensors[name][0, 0] ^= 1
    save_file(tensors, folder / "model.safetensors", metadata={"changed": "yes"})
    assert runnable(folder) != first


def test_lowq_and_dense_folders_are_opened_without_import(family_checkpoints):
    folders = family_checkpoints("llama", "float32", WHOLE)
    assert runnable(folders.packed) == str(folders.packed)
    assert runnable(folders.dense) == str(folders.dense)
    assert runnable("demo") == "demo"
    assert not (home.cache_dir() / "imports").exists()


def test_fp8_blocks_with_static_activations_become_dense(family_checkpoints, tmp_path):
    folders = family_checkpoints("llama", "bfloat16", WHOLE)
    folder = tmp_path / "fp8"
    shutil.copytree(folders.dequantized, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}
    (folder / "config.json").write_text(json.dumps(config))
    out = runnable(folder)
    assert not is_checkpoint(out)
    result = load_file(f"{out}/model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(result[name], (tensors[name].float() / 2).bfloat16())
    assert runnable(folder) == out


def test_a_killed_import_leaves_nothing_whole_looking(foreign, cache, monkeypatch):
    folder, _ = foreign("awq", INT4)
    monkeypatch.setattr(importer, "pack", lambda q: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        runnable(folder)
    assert not list((cache / "lowq" / "imports").iterdir())


def test_a_tokenizer_that_changed_comes_into_the_import(foreign):
    folder, _ = foreign("awq", INT4)
    imported = Path(runnable(folder))
    (folder / "chat_template.jinja").write_text("new")
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "w7"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Path(runnable(folder)) == imported
    assert (imported / "chat_template.jinja").read_text() == "new"
    assert json.loads((imported / "tokenizer_config.json").read_text())["eos_token"] == "w7"
    assert not [p for p in imported.iterdir() if p.is_dir()]


def test_two_that_write_one_folder_at_once_do_not_meet(tmp_path):
    out = tmp_path / "out"
    slow = new_folder(out)
    first = slow.__enter__()
    (first / "file").write_text("first")
    with new_folder(out) as second:
        (second / "file").write_text("second")
    assert (first / "file").read_text() == "first"
    with pytest.raises(UsageError, match="Directory not empty"):
        slow.__exit__(None, None, None)
    assert (out / "file").read_text() == "second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "out"]  # the cache holds a list of unfinished folders


def test_files_of_a_killed_import_are_removed_and_others_stay(tmp_path):
    slow = new_folder(tmp_path / "out")
    held = slow.__enter__()
    others = []
    for name, owner in (("0" * 12, "1" * 12), ("2" * 12, None), ("mine", "mine")):  # what names itself otherwise, or not at all
        path = tmp_path / f"out.{name}.partial"
        path.mkdir()
        (path / "file").write_text("bytes")
        if owner:
            (path / "lowq-run").write_text(json.dumps({"id": owner}))
        others.append(path.name)
    (tmp_path / f"out.{'4' * 12}.partial").symlink_to(tmp_path / "elsewhere")
    left = tmp_path / f"out.{'3' * 12}.partial"
    shutil.copytree(held, left)
    (left / "lowq-run").write_text(json.dumps({"id": "3" * 12}))
    with new_folder(tmp_path / "out") as quick:
        (quick / "file").write_text("whole")
        there = {p.name for p in tmp_path.iterdir()}
        assert there == {*others, f"out.{'4' * 12}.partial", held.name, quick.name}
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["file"]
    with pytest.raises(UsageError):
        slow.__exit__(None, None, None)


def test_a_cache_that_cannot_be_written_says_how_to_name_another(foreign, cache):
    folder, _ = foreign("awq", INT4)
    shutil.rmtree(cache, ignore_errors=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="XDG_CACHE_HOME=DIR"):
        runnable(folder)


def test_zeros_that_bfloat16_would_round_are_reported(foreign, capsys):
    folder, _ = foreign("mlx", WHOLE)
    runnable(folder)
    assert "of a step off" not in capsys.readouterr().err  # whole zeros
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.biases"] *= 1.003  # 128.38 for 128, where bfloat16 has whole numbers only
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    runnable(folder)
    assert "up to 0.38 of a step off" in capsys.readouterr().err


def test_bad_scales_and_unknown_formats_are_one_error(foreign):
    folder, _ = foreign("awq", INT4)
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith(".scales"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DamagedError, match="NaN"):
        runnable(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "exl2"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="'exl2'"):
        runnable(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts(foreign, family):
    folder, made = foreign("compressed-tensors", INT4, family)
    assert open_checkpoint(runnable(folder)).schemes == open_checkpoint(made.packed).schemes


def test_generate_takes_a_foreign_checkpoint(foreign, capsys):
    folder, _ = foreign("gptq", WHOLE)
    args = ["generate", str(folder), "--prompt", "w5 w6", "--max-new-tokens", "4", "--device", "cpu", "--json"]
    assert main.main(args) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"


def test_tune_measures_a_foreign_checkpoint_into_its_import(foreign, capsys):
    folder, _ = foreign("awq", INT4)
    args = ["tune", str(folder), "--device", "cpu", "--batch", "1", "--budget", "3", "--json"]
    assert main.main(args) == 0
    assert json.loads(capsys.readouterr().out)["entries"]
    assert (Path(runnable(folder)) / "lowq_tune.json").is_file()
    assert not (folder / "lowq_tune.json").exists()


def test_another_tools_checkpoint_is_exported_to_a_third(foreign, tmp_path, monkeypatch, capsys):
    folder, _ = foreign("gptq", INT4)
    monkeypatch.chdir(tmp_path)
    assert main.main(["export", str(folder), "--to", "awq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == "model-awq", "named after the model, not after its import"
    with open_decoded(folder) as ours, open_decoded(tmp_path / "model-awq") as theirs:
        assert ours.headers.keys() == theirs.headers.keys()
        assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.headers)


@pytest.mark.parametrize("every", [False, True])
def test_an_export_says_which_weights_have_lost_their_codes(foreign, tmp_path, every):
    """Such as those whose groups are permuted: without a line the export was just larger than the file that it came from."""
    folder, _ = foreign("gptq", INT4)
    tensors = load_file(folder / "model.safetensors")
    indices = [n for n in tensors if n.endswith("g_idx")]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    for n in indices if every else indices[:2]:
        tensors[n] = tensors[n].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    if every:
        with pytest.raises(UnsupportedError, match=rf"^{folder}: lowq reads .* lowq quantize {folder} --export awq$"):
            export(folder, "awq", tmp_path / "out")
    else:
        (note,) = [n for n in export(folder, "awq", tmp_path / "out").notes if "as dense" in n]
        assert note.startswith(f"2 of {len(indices)} quantized weights are written unpacked: lowq reads ")
