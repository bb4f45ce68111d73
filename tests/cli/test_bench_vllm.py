"""lowq bench --vllm: both engines' numbers side by side; what vLLM cannot serve, or its absence, is one line."""

import json
from importlib.util import find_spec

import pytest

from lowq_cli import main
from lowq_cli.interop import vllm_speed
from lowq_packers.errors import UnsupportedError
from lowq_packers.scheme import Scheme

SYM = {"attention": Scheme(4, 16, "none"), "mlp": Scheme(4, 16, "none")}
ENGINE = """import json, sys
speed = 200.0 if 'exports' in sys.argv[1] else 300.0
batches = [int(b) for b in sys.argv[4].split(',')]
json.dump({'rows': [{'batch': b, 'tokens_per_s': b * speed} for b in batches]}, open(sys.argv[2], 'w'))
"""


def cli(*args):
    return main.main(["bench", *map(str, args), "--vllm"])


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A stand-in for the process that runs an engine: exports make 200 tokens a second a sequence, checkpoints 300."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    real = vllm_speed.subprocess.run
    (tmp_path / "vllm.py").touch()  # importable, so it counts as installed
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        vllm_speed.subprocess, "run", lambda line, **how: real([line[0], str(script), *line[3:]], **how)
    )  # line: python -m module folder out ...
    return script


def test_both_kernels_are_measured(family_checkpoints, engine, capsys):
    folder = family_checkpoints("llama", "bfloat16", SYM).packed
    assert cli(folder, "--batch", "1,4", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows == [{"batch": 1, "vllm": 200.0, "lowq": 300.0}, {"batch": 4, "vllm": 800.0, "lowq": 1200.0}]
    assert cli(folder, "--batch", "4") == 0
    assert "1.50" in capsys.readouterr().out


def test_schemes_that_vllm_has_no_kernels_for(family_checkpoints, engine, capsys):
    folder = family_checkpoints("llama", "bfloat16", {"mlp": Scheme(3, 16, "float")}).packed
    assert cli(folder, "--batch", "1", "--json") == 0
    result = capsys.readouterr()
    assert json.loads(result.out)["rows"] == [{"batch": 1, "vllm": None, "lowq": 300.0}]
    assert "it has none for these schemes" in result.err


def test_a_failed_engine_is_one_line(family_checkpoints, engine):
    folder = family_checkpoints("llama", "bfloat16", SYM).packed
    engine.write_text("raise SystemExit('no GPU here')")
    with pytest.raises(UnsupportedError, match=r"vLLM did not serve .*: no GPU here"):
        vllm_speed.run(folder)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_is_one_line(family_checkpoints, capsys):
    folder = family_checkpoints("llama", "bfloat16", SYM).packed
    assert cli(folder) == 5
    assert "pip install vllm" in capsys.readouterr().err
    assert cli(folder, "--bits", 4) == 2
