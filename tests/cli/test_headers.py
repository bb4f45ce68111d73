"""What is asked of headers is answered without torch and transformers: the commands as processes, and what they imported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowq
from lowq_kernels.dispatch import tuning_file

HEAVY = ("torch", "transformers", "triton", "numpy", "tokenizers")
PROGRAM = f"""
import sys
from lowq_cli import main
main._end = lambda code: (print("imported", *(m for m in {HEAVY} if m in sys.modules), file=sys.stderr), sys.exit(code))
main.run()
"""


def imported(*args, folder=None):
    """What of HEAVY a command imported, and its stdout."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, args)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()[1:], done.stdout


@pytest.fixture
def tuned(demo4, tmp_path):
    folder = Path(shutil.copytree(demo4, tmp_path / "tuned"))
    tuning_file.write_file(folder / tuning_file.FILE, tuning_file.Machine("NVIDIA H100", (9, 0), "2.8.0", "3.4.0"), [])
    return folder


def test_inspect_imports_no_torch(tuned):
    for model in ("demo", tuned):
        found, said = imported("inspect", model, "--json")
        assert not found
        assert json.loads(said)["tensors"]


def test_inspect_of_a_foreign_format_imports_no_torch(demo4, tmp_path):
    assert "torch" in imported("quantize", "demo", "--format", "fp8", "--out", tmp_path / "fp8")[0]
    lowq.export(demo4, "mlx", tmp_path / "mlx")
    for folder in ("fp8", "mlx"):
        found, said = imported("inspect", tmp_path / folder, "--json")
        assert not found
        assert json.loads(said)["tensors"]


def test_ls_imports_no_torch(tuned):
    assert not imported("ls")[0]


@pytest.mark.parametrize("flags", [(), ("--method", "gptq"), ("--format", "fp8"), ("--for", "vllm")], ids=" ".join)
def test_a_plan_of_a_known_family_imports_no_torch(flags, tmp_path):
    found, said = imported("quantize", "demo", *flags, "--dry-run", "--json", folder=tmp_path)
    assert not found
    plan = json.loads(said)
    assert plan["quantized_fraction"] > 0.5
    assert plan["budget"]["seconds"] is None  # a sample of the work would tell: the run takes one


def test_quantizing_a_known_family_imports_no_transformers(tmp_path):
    assert "transformers" not in imported("quantize", "demo", "--method", "rtn", "--bits", "8", folder=tmp_path)[0]
