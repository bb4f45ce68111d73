"""The programs of examples/: each runs as a person would run it, is short, and is named in their index."""

import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {"serve_and_ask": "openai", "qlora_with_peft": "peft"}
MOST_LINES = 60
OF_ENGINE = 200


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_in_an_empty_folder(path, tmp_path, monkeypatch, capsys):
    pytest.importorskip(NEEDS.get(path.stem, "torch"), reason=f"{path.stem} needs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # where `lowq` is
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short(path):
    most = OF_ENGINE if path.stem.startswith("engine") else MOST_LINES
    lines = path.read_text().splitlines()
    assert len(lines) <= most
    assert lines[0].startswith('"""')


def test_every_example_is_in_the_index():
    named = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(named) == [p.name for p in EXAMPLES]
    assert len(EXAMPLES) == 10
