"""The arrows of the design, and what the wheel holds: checked, so that nobody has to argue them in review."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"lowq_cli": "lowq_cli", "lowq_kernels": "kernels", "lowq_packers": "packers"}
MAY_IMPORT = {"lowq_packers": set(), "lowq_kernels": {"lowq_packers"}, "lowq_cli": {"lowq_packers", "lowq_kernels"}}
SOURCES = [(package, path) for package, folder in FOLDERS.items() for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Every module a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return found


def ids(case):
    return str(case[1].relative_to(ROOT))


@pytest.mark.parametrize("case", SOURCES, ids=ids)
def test_imports_point_one_way(case):
    package, path = case
    tops = {name.split(".")[0] for name in imported(path)}
    wrong = (tops & set(FOLDERS)) - MAY_IMPORT[package] - {package}
    assert not wrong, f"{path} imports {wrong}"
    assert not tops & {"kernels", "packers"}, f"{path} uses a folder name as an import name"


@pytest.mark.parametrize("case", SOURCES, ids=ids)
def test_only_hf_imports_transformers(case):
    _, path = case
    if "hf" not in path.relative_to(ROOT).parts:
        assert not {n for n in imported(path) if n.split(".")[0] == "transformers"}


@pytest.mark.parametrize("case", [c for c in SOURCES if c[0] == "lowq_packers"], ids=ids)
def test_packers_need_only_torch(case):
    tops = {name.split(".")[0] for name in imported(case[1])}
    assert tops <= {"torch", "lowq_packers", *sys.stdlib_module_names}


def test_only_the_console_prints():
    printing = []
    for package, path in SOURCES:
        calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
        if path.name != "console.py" and any(c.func.id == "print" for c in calls):
            printing.append(f"{package}: {path.name}")
    assert not printing


def test_every_package_folder_is_declared():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert found == declared


@pytest.mark.slow
def test_the_wheel_holds_our_packages_and_nobody_elses(tmp_path):
    tree = tmp_path / "tree"  # setuptools leaves a build folder behind, whose stale files the next wheel would hold
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "benchmarks", "tests", "docs"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("lowq-*.whl"))).namelist()
    tops = {n.split("/")[0] for n in names if not n.split("/")[0].endswith(".dist-info")}
    assert tops == {"lowq.py", *FOLDERS}
    for package, path in SOURCES:
        assert "/".join([package, *path.relative_to(ROOT / FOLDERS[package]).parts]) in names
    for data in ("lowq_cli/demo/model.safetensors", "lowq_cli/demo/tokenizer.json"):
        assert data in names
    for source in (ROOT / "kernels").rglob("*.cu*"):
        assert "/".join(["lowq_kernels", *source.relative_to(ROOT / "kernels").parts]) in names
