"""lowq export: its files read back as the same weights, with our reader and the tools' own; or nothing is written."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from exported import FLOAT, HEAD, INT4, SYM, dense_tensors
from safetensors.torch import load_file, save_file

from lowq_cli import main
from lowq_cli.commands.export import LOAD_COMMANDS
from lowq_cli.files.checkpoint import open_checkpoint
from lowq_cli.files.source import open_source
from lowq_cli.interop.export_checks import exportable
from lowq_cli.interop.exporter import encoded, export
from lowq_cli.interop.foreign import open_decoded
from lowq_cli.interop.inspection import inspect_model
from lowq_packers import formats
from lowq_packers.errors import UnsupportedError, UsageError
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import Scheme

CASES = [
    ("gptq", SYM | HEAD),
    ("gptq", INT4),
    ("awq", INT4),
    ("compressed-tensors", SYM | HEAD),
    ("compressed-tensors", INT4),
    ("hqq", FLOAT),
    ("mlx", SYM),
]


@pytest.mark.parametrize(("to", "schemes"), CASES, ids=lambda v: v if isinstance(v, str) else v["mlp"].zero)
def test_an_export_opens_as_the_weights_that_the_checkpoint_stands_for(bf16_checkpoints, tmp_path, to, schemes):
    folders = bf16_checkpoints("llama", schemes)
    done = export(folders.packed, to, tmp_path / "out")
    assert done.bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    with open_decoded(tmp_path / "out") as source, open_source(folders.dequantized) as expected:
        ours, theirs = dense_tensors(source), dense_tensors(expected)
        assert "quantization_config" not in source.config
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name].to(theirs[name].dtype), theirs[name]), name
    shown = inspect_model(str(tmp_path / "out"))
    assert shown.format == to
    assert sum(r.params for r in shown.rows if r.quantized) == sum(
        r.params for r in inspect_model(str(folders.packed)).rows if r.quantized
    )
    assert "lowq" in shown.engines


def test_several_files_and_an_index(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", SYM)
    export(folders.packed, "compressed-tensors", tmp_path / "out", file_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    with open_decoded(tmp_path / "out") as source, open_source(folders.dequantized) as expected:
        assert source.headers.keys() == expected.headers.keys()  # open_source checks the index


def test_the_same_bytes_twice(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", INT4)
    for out in ("a", "b"):
        export(folders.packed, "awq", tmp_path / out)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("export", "demo", "--to", "llama.cpp"), "--to llama.cpp does not exist; did you mean --to gguf?"),
        (("export", "demo", "--to", "AWQ"), "--to AWQ does not exist; did you mean --to awq?"),
        (("export", "demo", "--to", "onnx"), "--to onnx does not exist; use one of compressed-tensors, "),
        (("quantize", "demo", "--export", "vLLM"), "--export vLLM does not exist; did you mean --export compressed-tensors?"),
        (("quantize", "demo", "--for", "GGUF"), "--for GGUF does not exist; did you mean --for llama.cpp?"),
        (("export", "demo", "--to", "mlx"), "demo is a model that is not quantized; run: lowq quantize demo --export mlx"),
    ],
)
def test_a_name_that_is_not_a_format_leads_to_the_one_that_was_meant(words, line, capsys):
    assert main.main(list(words)) == 2
    assert line in capsys.readouterr().err


REFUSED = [
    ("gptq", FLOAT, "nearest: quantize with --zero int"),
    ("awq", SYM, "nearest"),
    ("compressed-tensors", FLOAT, "--to humming"),
    ("mlx", INT4 | {"mlp": Scheme(1, 32, "int")}, "nearest: --bits 2"),
    ("gguf", FLOAT, "nearest: --bits 4 --group 32"),
    ("mlx", FLOAT, "--round"),
    ("humming", FLOAT, "multiple of 64"),
]


@pytest.mark.parametrize(("to", "schemes", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_scheme_that_a_format_cannot_hold_is_refused_without_files(bf16_checkpoints, tmp_path, to, schemes, message):
    folders = bf16_checkpoints("llama", schemes)
    with pytest.raises(UnsupportedError, match=message):
        export(folders.packed, to, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_format_whose_config_has_one_group_size_is_not_offered_for_two(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", INT4 | {"mlp": Scheme(4, 16, "int")})
    for folder, offered in ((folders.packed, False), (bf16_checkpoints("llama", INT4).packed, True)):
        checkpoint = open_checkpoint(folder)
        with checkpoint.source:
            assert ("awq" in exportable(checkpoint)) == offered
    with pytest.raises(UnsupportedError, match="one group size for all layers"):
        export(folders.packed, "awq", tmp_path / "out")


def test_a_full_folder_an_unknown_format_and_a_model_that_is_not_ours(bf16_checkpoints, tmp_path):
    folders = bf16_checkpoints("llama", SYM)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    with pytest.raises(UsageError, match="is there already"):
        export(folders.packed, "gptq", tmp_path / "out")
    with pytest.raises(UsageError, match="does not exist; use one of"):
        export(folders.packed, "exl2", tmp_path / "new")
    with pytest.raises(UsageError, match="not quantized"):
        export(folders.dense, "gptq", tmp_path / "new")
    assert (tmp_path / "out" / "precious").read_text() == "data"


def test_help_names_the_formats_that_there_are():
    assert tuple(LOAD_COMMANDS) == formats.EXPORTED


def test_the_command(bf16_checkpoints, tmp_path, capsys):
    folders = bf16_checkpoints("llama", SYM)
    args = ["export", str(folders.packed), "--to", "gptq", "--out", str(tmp_path / "out"), "--json"]
    assert main.main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["format"] == "gptq"
    assert (tmp_path / "out" / "quantize_config.json").is_file()
    assert main.main([*args[:3], "awq", *args[4:-1]]) == 5
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("to", ["mlx", "gptq", "hqq"])
def test_groups_of_scale_zero(bf16_checkpoints, tmp_path, to):
    """All weights of such a group are 0, whatever their codes; formats with offsets keep other codes for it."""
    folders = bf16_checkpoints("llama", SYM)
    folder = tmp_path / "m"
    shutil.copytree(folders.packed, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight_scale"][3] = 0
    save_file(tensors, folder / "model.safetensors")
    export(folder, to, tmp_path / "out")
    with open_decoded(tmp_path / "out") as source:
        assert not source.read(f"{name}.weight").reshape(96, 64)[3].any()


def test_a_format_that_lies_is_caught(bf16_checkpoints, tmp_path, monkeypatch):
    fmt = formats.get("awq")

    def write(name, q, config):
        tensors = fmt.write(name, q, config)
        tensors[f"{name}.qweight"][0, 0] ^= 1
        return tensors

    monkeypatch.setitem(formats.FORMATS, "awq", replace(fmt, write=write))
    with pytest.raises(AssertionError, match="does not read back"):
        export(bf16_checkpoints("llama", INT4).packed, "awq", tmp_path / "out")
    assert not list(tmp_path.iterdir())


WORDS = [("compressed-tensors", 3, "int", 611), ("compressed-tensors", 8, "none", 300), ("humming", 4, "float", 320)]
WORDS += [("humming", 1, "none", 320), ("humming", 2, "int", 576)]


@pytest.mark.parametrize(("to", "bits", "zero", "N"), WORDS)
def test_words_that_are_taken_as_they_are_are_those_of_the_codes(to, bits, zero, N, monkeypatch):
    fmt, g = formats.get(to), torch.Generator().manual_seed(N)
    codes = torch.randint(0, 1 << bits, (N, 96), generator=g, dtype=torch.uint8)
    zeros = {"none": None, "int": codes[:, :3].half(), "float": torch.rand(N, 3, generator=g).half()}[zero]
    q = QuantizedTensor(codes, torch.rand(N, 3, generator=g).half() + 0.1, zeros, bits, 32, zero)
    config = fmt.config({"m": q.scheme}, {"m": q.shape}, [])
    taken, made = encoded(fmt, "m", pack(q), config), fmt.write("m", q, config)
    assert taken.keys() == made.keys()
    assert all(torch.equal(taken[n], made[n]) and taken[n].dtype == made[n].dtype for n in made)

    def write(name, p, config):
        tensors = fmt.write_words(name, p, config)
        return {n: t.flip(0) if n.endswith("scale") and p.N == N else t for n, t in tensors.items()}

    with pytest.raises(AssertionError, match="does not match its encoded codes"):
        encoded(replace(fmt, write_words=write), "m", pack(q), config)


@pytest.mark.parametrize(
    "schemes", [SYM, {"attention": Scheme(2, 32, "none"), "mlp": Scheme(3, 16, "none")}], ids=["4+8", "2+3"]
)
def test_transformers_loads_a_compressed_tensors_export_with_our_logits(family_checkpoints, tmp_path, schemes):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra interop)")
    from transformers import AutoModelForCausalLM

    folders = family_checkpoints("llama", "float32", schemes)
    export(folders.packed, "compressed-tensors", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = AutoModelForCausalLM.from_pretrained(folders.dequantized).eval()
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
