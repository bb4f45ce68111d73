"""Commands that read only headers import neither torch nor transformers: run as processes, with the list of their imports."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lowq
from lowq_cli.files.safetensors_io import read_header
from lowq_cli.files.source import DEMO
from lowq_cli.main import app
from lowq_cli.plan.recipe import make_recipe
from lowq_cli.run.prepare import prepare
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


def inspected(folder):
    """What `inspect` prints, in this process."""
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tensors"]
    return result.stdout


@pytest.fixture
def tuned(demo4, tmp_path):
    folder = Path(shutil.copytree(demo4, tmp_path / "tuned"))
    tuning_file.write_file(folder / tuning_file.FILE, tuning_file.Machine("NVIDIA H100", (9, 0), "2.8.0", "3.4.0"), [])
    return folder


@pytest.fixture(scope="module")
def demo4_none(tmp_path_factory):
    out = tmp_path_factory.mktemp("none") / "q"
    lowq.quantize("demo", out=out, bits=4, zero="none", method="rtn")
    return out


def test_inspect_imports_no_torch_but_for_scales_of_our_own(tuned):
    result, output = imported("inspect", "demo", "--json")
    assert not result
    assert json.loads(output)["tensors"]
    result, output = imported("inspect", tuned, "--json")  # which exports hold it is asked of its scales and zeros
    assert set(result) <= {"torch", "numpy"}
    assert json.loads(output)["tensors"]


def test_inspect_of_a_foreign_format_imports_no_torch(demo4, tmp_path):
    assert "torch" in imported("quantize", "demo", "--format", "fp8", "--out", tmp_path / "fp8")[0]
    lowq.export(demo4, "mlx", tmp_path / "mlx")
    for folder in ("fp8", "mlx"):
        result, output = imported("inspect", tmp_path / folder, "--json")
        assert not result
        assert json.loads(output)["tensors"]


@pytest.mark.parametrize("form", ["lowq", "mlx", "gptq", "compressed-tensors", "dense"])
def test_inspect_reads_no_codes_and_no_dense_weights(form, demo4_none, tmp_path):
    """With all of them set to zero it says the same; scales and zeros stay."""
    if form in ("lowq", "dense"):
        shutil.copytree(demo4_none if form == "lowq" else DEMO, tmp_path / "m", ignore=shutil.ignore_patterns("__pycache__"))
    else:
        lowq.export(demo4_none, form, tmp_path / "m")
    before = inspected(tmp_path / "m")
    small = re.compile(r"(scale|zero|scales|biases|qzeros|g_idx|shape|zero_point)$")
    changed = 0
    for path in (tmp_path / "m").glob("*.safetensors"):
        header = read_header(path)
        with open(path, "r+b") as f:
            for name, tensor in header.tensors.items():
                if not small.search(name):
                    f.seek(tensor.offset)
                    f.write(bytes(tensor.nbytes))
                    changed += tensor.nbytes
    assert changed > 1 << 20
    assert inspected(tmp_path / "m") == before


def test_ls_imports_no_torch(tuned):
    assert not imported("ls")[0]


@pytest.mark.parametrize("flags", [(), ("--format", "fp8"), ("--for", "vllm")], ids=" ".join)
def test_a_plan_of_a_known_family_imports_no_torch(flags, tmp_path):
    result, output = imported("quantize", "demo", *flags, "--dry-run", "--json", folder=tmp_path)
    assert not result
    plan = json.loads(output)
    assert plan["quantized_fraction"] > 0.5
    assert plan["budget"]["seconds"] is None  # a sample of the work would tell: the run takes one


@pytest.mark.parametrize("method", ["gptq", "distill"])
@pytest.mark.parametrize("calib", [(), ("--calib", "bundled")], ids=["own text", "bundled"])
def test_a_plan_of_a_calibration_names_its_time_and_the_folder_that_the_run_writes(method, calib, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("quantize", "demo", "--method", method, "--calib-tokens", "4096", *calib, "--device", "cpu", "--dry-run", "--json")
    plan = json.loads(imported(*flags, folder=tmp_path)[1])
    assert 1 < plan["budget"]["seconds"] < 600
    assert plan["budget"]["within"] == 2
    with prepare(
        "demo", make_recipe(None, method=method, calib_tokens=4096, calib=(calib or ("", None))[1]), device="cpu"
    ) as run:
        assert Path(plan["out"]).name == run.out.name
        assert plan["notes"] == [*run.plan.notes] or not calib
    assert not list(tmp_path.iterdir())


def test_quantizing_a_known_family_imports_no_transformers(tmp_path):
    assert "transformers" not in imported("quantize", "demo", "--method", "rtn", "--bits", "8", folder=tmp_path)[0]
