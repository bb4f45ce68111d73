"""`export` does what `inspect`, cards, refusals and quantize's last lines say about it, and their commands run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from folders import write_tokenizer

from lowq_cli import main
from lowq_cli.files.checkpoint import Checkpoint, open_checkpoint
from lowq_cli.interop.card import model_card
from lowq_cli.interop.export_checks import commands
from lowq_cli.interop.exporter import export
from lowq_cli.interop.inspection import inspect_model
from lowq_cli.run.pipeline import quantize
from lowq_packers.errors import LowqError
from lowq_packers.formats import EXPORTED

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "mixtral", "qwen3-moe"]
# promises depend on tensors and norms, of which qwen2 and llama-tied have what these have
CASES = [pytest.param(f, marks=[pytest.mark.more] * (f in ("llama", "qwen3", "mistral"))) for f in FAMILIES]
RECIPES = [
    {"bits": 4, "group": "32"},
    {"bits": 4, "group": "32", "zero": "none"},
    {"bits": 4, "group": "32", "zero": "int", "lm_head": "keep"},
    {"bits": 8, "group": "32", "zero": "none", "lm_head": "keep"},
    {"bits": 1, "group": "32"},
    {"bits": 4, "group": "32", "embedding": "8"},
    {"format": "nvfp4", "lm_head": "keep"},
    {"format": "nf4", "group": "32", "lm_head": "keep"},
]
PLAIN = ("qwen2", "qwen3", "mistral", "gemma3", "qwen3-moe")  # as another of FAMILIES but for norms, biases, windows


def recipes(family: str) -> list[tuple[int, dict[str, object]]]:
    """(number, recipe); of PLAIN each takes a third, so that each recipe meets one or two of them."""
    numbered = list(enumerate(RECIPES))
    return numbered[PLAIN.index(family) % 3 :: 3] if family in PLAIN else numbered


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A state and a cache of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(family_checkpoints, tmp_path):
    """A folder of a dense model of a family, with a tokenizer."""

    def make(family: str) -> Path:
        folder = tmp_path / f"{family} dense"  # a path that a shell would split
        shutil.copytree(family_checkpoints(family, "bfloat16").dense, folder)
        write_tokenizer(folder)
        return folder

    return make


def run(line: str, capsys) -> tuple[int, str]:
    """Exit code and stderr of a command line."""
    code = main.main(shlex.split(line)[1:])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("family", CASES)
def test_every_promise_is_kept_and_nothing_else_is_written(family, model, tmp_path):
    dense = model(family)
    for i, recipe in recipes(family):
        folder = tmp_path / f"q{i}"
        try:
            quantize(dense, folder, method="rtn", **recipe)
        except LowqError:
            continue  # not a recipe for this family
        with (result := open_checkpoint(folder)).source:
            promised, card = commands(result), model_card(result, "me/m")
        shown = [e for e in inspect_model(str(folder)).engines if "lowq export" in e]
        assert shown == [f"{to} (lowq export{' --round' if 'round' in how else ''})" for to, how in promised.items()]
        assert re.findall(r"lowq export m (.*)", card) == sorted(promised.values(), key=lambda how: "--round" in how)
        for to in EXPORTED:
            for rounding in (False, True):
                out = tmp_path / f"{folder.name}-{to}-{rounding}"
                expected = to in promised and ("--round" not in promised[to] or rounding)
                if expected:
                    export(folder, to, out, rounding=rounding)
                    continue
                with pytest.raises(LowqError):
                    export(folder, to, out, rounding=rounding)
                assert not out.exists()


@pytest.mark.parametrize("family", CASES)
def test_every_command_that_a_refusal_prints_runs(family, model, tmp_path, monkeypatch, capsys):
    """From another working folder, in which the model's name is not a path."""
    dense, printed = model(family), set()
    for i, recipe in [(i, recipe) for i, recipe in recipes(family) if i < 5]:
        flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in recipe.items())
        (tmp_path / "here").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path)
        code, err = run(f"lowq quantize '{dense.name}' --method rtn --out here/q{i} {flags}", capsys)
        if code:
            continue
        printed |= {(line, str(tmp_path)) for line in re.findall(r": (lowq quantize .*--export \S+)", err)}
        printed |= {(line, str(tmp_path)) for line in re.findall(r"other engines: (lowq export .*--to \S+)", err)}
        monkeypatch.chdir(tmp_path / "here")
        for to in EXPORTED:
            code, err = run(f"lowq export q{i} --to {to} --out {i}.{to}", capsys)
            assert code in (0, 3, 5), err
            printed |= {(line, str(tmp_path / "here")) for line in re.findall(r"from the original: (lowq quantize .*)", err)}
    assert printed or family == "gpt2"
    for n, (line, where) in enumerate(sorted(printed)):
        monkeypatch.chdir(where)
        out = tmp_path / f"again{n}.{line.split()[-1]}"
        code, err = run(f"{line} {'--method rtn' if 'quantize' in line else ''} --out {out}", capsys)
        assert code == 0, (line, err)


def test_the_values_that_decide_are_read_once_for_all_formats(model, tmp_path, monkeypatch):
    """`quantize` and `inspect` ask every format, and scales and zeros of an 8B are 250 MB."""
    quantize(str(model("llama")), tmp_path / "q", bits=4, group=32, zero="int", method="rtn", device="cpu")
    result, read, whole = open_checkpoint(tmp_path / "q"), [], Checkpoint.read_companions
    monkeypatch.setattr(Checkpoint, "read_companions", lambda self, t: (read.append(t.name), whole(self, t))[1])
    assert len(commands(result)) > 3
    assert len(read) == len(set(read)) > 0
