"""What --out names, and which model a command takes that is given none: the newest that was made, a GGUF file, too."""

import json
from pathlib import Path

import pytest

from lowq_cli import main, state

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def cli(*args):
    return main.main([*map(str, args)])


RTN = ("--method", "rtn", "--device", "cpu")


@pytest.mark.parametrize(("form", "out"), [("gguf", "mine.gguf"), ("mlx", "mine")])
def test_out_names_the_export_and_the_plan_names_both(form, out, capsys):
    line = ["quantize", "demo", *RTN, "--export", form, "--out", out]
    assert cli(*line, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["export"] == {"format": form, "out": out}
    assert not list(Path().iterdir())
    assert cli(*line, "--dry-run") == 0
    assert f"then exported: {out}; the checkpoint {plan['out']} stays" in capsys.readouterr().out
    assert cli(*line, "--json") == 0
    assert json.loads(capsys.readouterr().out)["export"]["out"] == out
    assert {p.name for p in Path().iterdir()} == {out, plan["out"]}
    assert Path(out).is_file() == (form == "gguf")
    assert Path(plan["out"], "config.json").is_file()
    assert cli(*line, "--json") == 0
    assert json.loads(capsys.readouterr().out)["export"]["already_done"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("quantize", "demo", *RTN, "--out", "mine.gguf"), "for a GGUF file add --export gguf"),
        (("quantize", "demo", *RTN, "--export", "gguf", "--out", "mine"), "ends in .gguf; use --out mine.gguf"),
        (("quantize", "demo", "--type", "Q8_0", "--out", "mine"), "ends in .gguf; use --out mine.gguf"),
        (("quantize", "demo", "--type", "Q8_0", "--calib", "bundled", "--out", "mine"), "ends in .gguf; use --out mine.gguf"),
        (("export", "demo", "--type", "Q8_0", "--out", "mine"), "ends in .gguf; use --out mine.gguf"),
        (("quantize", "demo", *RTN, "--export", "gguf", "--out", "taken.gguf"), "taken.gguf is there already"),
    ],
    ids=lambda x: " ".join(x[:1] + x[-4:]) if isinstance(x, tuple) else "",
)
def test_a_name_that_misleads_is_refused_before_work(line, message, capsys):
    Path("taken.gguf").write_bytes(b"somebody's")
    assert cli(*line) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in Path().iterdir()] == ["taken.gguf"]
    assert Path("taken.gguf").read_bytes() == b"somebody's"


def test_the_checkpoints_own_place_is_refused_for_its_export(capsys):
    line = ("quantize", "demo", *RTN, "--export", "mlx")
    assert cli(*line, "--dry-run", "--json") == 0
    own = json.loads(capsys.readouterr().out)["out"]
    assert cli(*line, "--out", own) == 2
    assert "where the checkpoint is written" in capsys.readouterr().err
    assert not Path(own).exists()


def test_a_command_without_a_model_takes_the_newest_made(capsys):
    assert cli("quantize", "demo", *RTN) == 0
    first = state.checkpoint_or_last(None)
    assert Path(first).name.startswith("demo-lowq")
    assert cli("quantize", "demo", "--type", "Q8_0") == 0
    file = Path("demo-Q8_0.gguf").absolute()
    capsys.readouterr()
    assert cli("generate", "--prompt", "Once", "--max-new-tokens", 1, "--device", "cpu") == 0
    assert f"using {file}" in capsys.readouterr().err
    assert state.source_of(file, {}) == "demo"
    file.unlink()
    assert state.checkpoint_or_last(None) == first
    assert cli("export", "demo", "--type", "Q8_0", "--out", "other.gguf") == 0
    assert state.checkpoint_or_last(None) == str(Path("other.gguf").absolute())
    assert cli("ls") == 0


def test_an_export_of_the_same_weights_is_not_the_newest_model(capsys):
    assert cli("quantize", "demo", *RTN, "--export", "gguf", "--out", "m.gguf") == 0
    assert Path(state.checkpoint_or_last(None)).name.startswith("demo-lowq")
