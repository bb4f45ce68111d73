"""lowq run, ls and rm: a model quantized into the cache once, what is listed, and that nothing else is ever removed."""

import json
import sys
from pathlib import Path

import pytest

from lowq_cli import completion, holdings, main, state

SHORT = ("--max-new-tokens", "4", "--device", "cpu")


@pytest.fixture
def lowq(tmp_path, monkeypatch, capsys):
    """A function: run the command in a home of its own; (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["lowq", *map(str, args)])
        return main._run(), *capsys.readouterr()

    return run


def test_run_quantizes_once_and_the_last_checkpoint_stays_what_it_was(lowq, tmp_path):
    code, out, err = lowq("run", "demo", "Once upon a time", *SHORT)
    assert code == 0, err
    assert out.strip()
    assert "into the cache" in err
    again = lowq("run", "demo", "Once upon a time", *SHORT)
    assert again[:2] == (0, out)
    assert "into the cache" not in again[2]
    assert state.known() == []
    (run,) = holdings.holdings()
    assert (run.kind, run.path.parent) == ("run", tmp_path / "cache" / "lowq" / "runs")
    assert run.nbytes > 6e6
    assert lowq("run", run.path, "Once upon a time", *SHORT)[:2] == (0, out)


def written(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_rm_removes_what_is_listed_and_nothing_else(lowq, tmp_path):
    mine, stranger = written(tmp_path / "mine"), written(tmp_path / "stranger")
    state.remember(mine)
    imported = written(tmp_path / "cache" / "lowq" / "imports" / "model-1")
    exported = written(tmp_path / "cache" / "lowq" / "exports" / "awq" / "model-2")
    found = json.loads(lowq("ls", "--json")[1])
    assert {(Path(h["path"]).name, h["kind"]) for h in found["holdings"]} == {
        ("mine", "checkpoint"), ("model-1", "import"), ("model-2", "export")}  # fmt: skip
    assert found["bytes"] == 6
    code, _, err = lowq("rm", "stranger", "--yes")
    assert (code, "nothing that lowq wrote" in err) == (3, True)
    code, _, err = lowq("rm", "mine")
    assert (code, "add --yes" in err) == (2, True)
    (tmp_path / "link").symlink_to(mine)
    code, _, err = lowq("rm", "link", "--yes")
    assert (code, f"link is a link to {mine}; name that" in " ".join(err.split())) == (2, True)
    assert stranger.is_dir()
    assert mine.is_dir()
    assert lowq("rm", "mine", "--yes")[0] == 0
    assert lowq("rm", "--cached", "--yes")[0] == 0
    assert [p.exists() for p in (mine, imported, exported, stranger)] == [False, False, False, True]
    assert lowq("ls")[2] == "nothing yet; lowq quantize demo writes a checkpoint\n"


def test_rm_asks_in_a_terminal(lowq, tmp_path, monkeypatch):
    mine = written(tmp_path / "mine")
    state.remember(mine)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda asked: "n")
    assert lowq("rm", "mine")[0] == 2
    assert mine.is_dir()
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    assert lowq("rm", "mine")[0] == 0
    assert not mine.exists()


def test_values_complete(lowq, tmp_path, monkeypatch):
    state.remember(written(tmp_path / "mine"))
    assert completion.checkpoints("m") == ["mine"]
    assert completion.methods("g") == ["gptq"]
    assert completion.zeros("") == ["float", "int", "none"]
    assert completion.exports("g") == ["gptq", "gguf"]
    assert completion.models("d")[0] == "demo"
    monkeypatch.setenv("_LOWQ_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "lowq quantize demo --method h")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert "hqq" in lowq()[1]
