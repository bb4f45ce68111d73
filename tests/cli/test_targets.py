"""quantize --for ENGINE: the chosen schemes can be exported for that engine, or an error comes before work starts."""

import json
import shutil

import pytest

from lowq_cli import main
from lowq_cli.interop.exporter import export
from lowq_cli.plan import targets
from lowq_packers.errors import UsageError


def cli(*args):
    return main.main([*map(str, args)])


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("engine", targets.TARGETS)
def test_schemes_chosen_for_an_engine_export_exactly(family_checkpoints, tmp_path, engine):
    # GGUF needs a tokenizer, Humming's kernels rows in multiples of 64
    model = "demo" if engine in ("llama.cpp", "humming") else family_checkpoints("llama").dense
    assert cli("quantize", model, "--for", engine, "--method", "rtn", "--out", tmp_path / "m") == 0
    done = export(tmp_path / "m", targets.get(engine).export, tmp_path / "out")
    assert done.matrices == (42 if model == "demo" else 14)


def test_a_group_that_does_not_divide_every_layer_gives_way_to_one_that_does(family_checkpoints, tmp_path, capsys):
    """K is 64 and 96: of 64, 32 and 128 only 32 divides both."""
    dense = family_checkpoints("llama").dense
    assert cli("quantize", dense, "--for", "mlx", "--dry-run", "--json") == 0
    out = capsys.readouterr().out
    assert '"group": 32' in out
    assert '"4-bit g32 none zero"' in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--for", "vllm", "--bits", "3"], 2, "takes 4, 8 and 2"),
        (["--for", "mlx", "--group", "16"], 2, "takes 64, 32 and 128"),
        (["--for", "mlx", "--zero", "int"], 2, "--zero none"),
        (["--for", "mlx", "--export", "gguf"], 2, "mlx reads mlx, not gguf"),
        (["--export", "onnx"], 2, "use one of compressed-tensors, gguf, mlx"),
        (["--export", "awq", "--bits", "3"], 2, "--bits 3 and --export awq contradict each other: awq takes 4"),
        (["--for", "llama.cpp", "--bits", "2"], 2, "--bits 2 and --for llama.cpp contradict each other"),
        (["--export", "gguf", "--bits", "2"], 2, "takes 4 and 8; --type Q2_K, Q3_K_M, ... makes a file of other widths"),
        (["--for", "tgi"], 2, "use one of vllm, llama.cpp, mlx"),
        (["--for", "vllm", "--group", "64"], 5, "takes groups of"),
        (["--for", "vllm", "--override", "q_proj=8"], 5, "qkv_proj is made of"),
        (["--for", "llama.cpp", "--override", "q_proj=2"], 5, "q_proj"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_settings_that_an_engine_refuses_are_one_line_before_work(
    family_checkpoints, tmp_path, monkeypatch, capsys, args, code, message
):
    dense = family_checkpoints("llama").dense
    assert cli("quantize", dense, *args, "--out", tmp_path / "m") == code
    err = capsys.readouterr().err
    assert message in err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("flags", [["--export", "gguf"], ["--for", "llama.cpp"]], ids=" ".join)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, "has a sliding window"),
        ({"hidden_act": "gelu"}, "its activation is gelu"),
    ],
    ids=["window", "activation"],
)
def test_a_model_that_the_format_does_not_hold_is_refused_before_work(
    family_checkpoints, tmp_path, capsys, config, message, flags
):
    """All weights were quantized and written before the export refused."""
    dense = shutil.copytree(family_checkpoints("llama").dense, tmp_path / "dense")
    file = dense / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    assert cli("quantize", dense, *flags, "--out", tmp_path / "m") == 5
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_recipe_file_is_heard_too():
    with pytest.raises(UsageError, match="--bits 3"):
        targets.candidates("vllm", {"bits": None}, {"bits": 3})
    assert [c["group"] for c in targets.candidates("vllm", {"bits": None}, {"group": 64})] == [64]
    assert targets.candidates("vllm", {"bits": 4, "group": 32}, {"bits": 3})[0]["bits"] == 4


def test_a_budget_is_spent_on_schemes_that_the_engine_supports():
    (flags,) = targets.candidates("vllm", {"bpw": 4.5, "zero": None, "bits": None, "group": None}, {})
    assert flags["widths"] == targets.get("vllm").bits
    assert (flags["zero"], flags["lm_head"], flags["group"]) == ("none", "keep", None)


def test_the_defaults_of_quantize_and_export_meet(tmp_path, monkeypatch, capsys):
    """`lowq quantize demo && lowq export` was refused: float zeros."""
    monkeypatch.chdir(tmp_path)
    assert cli("quantize", "demo", "--method", "rtn") == 0
    assert cli("export", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["format"] == "humming"
    assert result["engines"]


def test_a_refused_export_ends_with_the_command_that_makes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli("quantize", "demo", "--method", "rtn", "--bits", "8") == 0
    capsys.readouterr()
    assert cli("export", "--to", "gguf") == 5
    way_out = capsys.readouterr().err.strip().rpartition("from the original: lowq ")[2]
    assert way_out == "quantize demo --bits 8 --export gguf"
    assert cli(*way_out.split(), "--method", "rtn", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["export"]["format"], result["export"]["matrices"]) == ("gguf", 42)
