"""Checks of the design that need no review: which folder imports which, and what the wheel contains."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import venv
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"lowq_cli": "lowq_cli", "lowq_kernels": "kernels", "lowq_packers": "packers"}
MAY_IMPORT = {"lowq_packers": set(), "lowq_kernels": {"lowq_packers"}, "lowq_cli": {"lowq_packers", "lowq_kernels"}}
FLOORS = {  # of each package, the ground first: a folder or file imports from those before it, and from itself
    "lowq_packers": (
        *("atomic", "errors", "home", "lazy", "regular"),
        *("scheme", "arch", "heads", "bitstream", "tables", "fp8", "qtensor", "layouts", "formats"),
    ),
    "lowq_kernels": (
        *("gpu", "optional", "workspaces", "counters", "graphs", "lasting", "activations", "rounding_triton", "tuned"),
        *("dispatch", "cuda", "products", "fp8", "gptq", "modules", "decode"),
    ),
    "lowq_cli": (
        *("ranks", "console", "devices", "workers", "memory", "drawing"),
        *("state", "cached_models", "running", "sessions", "demo", "recipes", "models"),
        *("files", "quantizers", "tensor", "hf", "plan", "calibrate", "interop"),
        *("output", "engine", "loading", "evaluate", "run", "inventory", "tuning", "serving"),
        *("checkup", "vllm_plugin", "run_output", "thinking", "generation", "line_input", "completion", "commands", "main"),
        "start",
    ),
}
CLIMBS: dict[tuple[str, str], str] = {}  # (importer, imported), both module names -> why this arrow may go up
BUDGET = 89_559
SOURCES = [(package, path) for package, folder in FOLDERS.items() for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree: seven tests read all of them."""
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Every module a file imports, at its top or inside a function."""
    result = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            result.add(node.module or "")
    return result


def module_name(package: str, path: Path) -> str:
    parts = [package, *path.relative_to(ROOT / FOLDERS[package]).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(package, path): path for package, path in SOURCES}


@cache
def arrows(name: str, lazily: bool = True) -> set[str]:
    """The modules of ours that a module imports, lazily too: `from a import b` is a.b where that is a module."""
    result, tree = set(), tree_of(MODULES[name])
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            result |= {f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module for a in node.names}
        elif isinstance(node, ast.Import):
            result |= {a.name for a in node.names}
    return result & set(MODULES) - {name}


def ids(case):
    return str(case[1].relative_to(ROOT))


@pytest.mark.parametrize("case", SOURCES, ids=ids)
def test_imports_point_one_way(case):
    package, path = case
    tops = {name.split(".")[0] for name in imported(path)}
    wrong = (tops & set(FOLDERS)) - MAY_IMPORT[package] - {package}
    assert not wrong, f"{path} imports {wrong}"
    assert not tops & {"kernels", "packers"}, f"{path} uses a folder name as an import name"


@pytest.mark.parametrize("package", FOLDERS)
def test_every_folder_has_a_floor(package):
    result = {name.split(".")[1] for name in MODULES if name.startswith(package + ".")}
    assert result == set(FLOORS[package]), "FLOORS says where each folder stands: add the new one, take out what is gone"


@pytest.mark.parametrize("package", FOLDERS)
def test_no_arrow_climbs(package):
    floor = {name: i for i, name in enumerate(FLOORS[package])}
    own = [n for n in MODULES if n.startswith(package + ".")]
    inner = [(a, b) for a in own for b in arrows(a) if b in own]
    climbing = {(a, b) for a, b in inner if floor[b.split(".")[1]] > floor[a.split(".")[1]]}
    assert climbing == set(CLIMBS) & set(inner)


def test_no_import_circle():
    seen, above = set(), []

    def visit(name):
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in seen:
            above.append(name)
            for other in sorted(arrows(name)):
                visit(other)
            seen.add(above.pop())

    for name in MODULES:
        visit(name)


def test_no_module_of_the_commands_needs_what_only_a_gpu_needs():
    """`pip install .` brings neither Triton nor NVIDIA's packages: asked for at a top they stop all commands."""
    reached, left = set(), {n for n in MODULES if n.startswith("lowq_cli") and "vllm_plugin" not in n}
    while left:
        reached.add(name := left.pop())
        parent = name.rpartition(".")[0]
        left |= ({parent} & set(MODULES) | arrows(name, lazily=False)) - reached
    assert "lowq_kernels.modules.linear" in reached
    for name in reached:
        tops = tree_of(MODULES[name]).body
        asked = {a.name for n in tops if isinstance(n, ast.Import) for a in n.names}
        asked |= {n.module for n in tops if isinstance(n, ast.ImportFrom)}
        assert not {a.split(".")[0] for a in asked} & {"cuda", "triton", "matplotlib", "llguidance"}, name


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
        calls = (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
        if path.name != "console.py" and any(c.func.id == "print" for c in calls):
            printing.append(f"{package}: {path.name}")
    assert not printing


def test_every_package_folder_is_declared():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    result = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            result.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert result == declared


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this tree, without compiled kernels: those are tested in tests/kernels/test_cpu_wheel.py."""
    made = tmp_path_factory.mktemp("wheel")
    tree = made / "tree"  # setuptools leaves a build folder behind, whose stale files the next wheel would hold
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "benchmarks", "tests", "docs"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(made), str(tree)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"LOWQ_CPU_ISA": "off"})
    return next(made.glob("lowq-*.whl"))


@pytest.mark.slow
def test_the_wheel_contains_only_our_files(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if not n.split("/")[0].endswith(".dist-info")}
    ours = {"lowq.py"}
    for package, folder in FOLDERS.items():
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        ours |= {"/".join([package, *p.relative_to(ROOT / folder).parts]) for p in files}
    assert {"lowq_cli/demo/model.safetensors", "lowq_cli/serving/http/page.html", "lowq_kernels/cuda/tile.cuh"} <= ours
    assert names == ours


@pytest.mark.slow
def test_a_fresh_environment_runs_the_wheel(wheel, tmp_path):
    """The command, the bundled model, the server and its page; only the libraries are those of this environment."""
    venv.create(tmp_path / "fresh", symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    site = Path(subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip())
    line = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(line, check=True, capture_output=True)
    (site / "libraries.pth").write_text(f"{Path(importlib.util.find_spec('torch').origin).parents[1]}\n")
    env = {"HOME": str(tmp_path), "PATH": f"{python.parent}:/usr/bin:/bin", "LOWQ_CPU_ISA": "off", "OMP_NUM_THREADS": "1"}

    def said(*line):
        return subprocess.check_output(line, env=env, cwd=tmp_path, text=True)

    assert str(site) in said(python, "-c", "import lowq_cli; print(lowq_cli)")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert said(python.parent / "lowq", "--version") == f"lowq {version}\n"
    line = [python.parent / "lowq", "serve", "demo", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(m[1] for row in server.stderr if (m := re.search(r"listening on (http://\S+)", row)))
            asked = json.dumps({"prompt": "Once", "max_tokens": 4}).encode()
            with urllib.request.urlopen(f"{url}/v1/completions", asked, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            with urllib.request.urlopen(url, timeout=60) as page:
                assert b"<!doctype html>" in page.read(100)
        finally:
            server.terminate()
            server.communicate(timeout=60)
    assert server.returncode == 0


def test_production_code_stays_within_its_budget():
    """Whoever needs more lines says so here, and why."""
    kinds = {".py", ".cu", ".cuh", ".cpp", ".h"}
    files = [p for folder in FOLDERS.values() for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    lines = sum(len(p.read_text().splitlines()) for p in [*files, ROOT / "lowq.py"])
    assert lines <= BUDGET, f"{lines} lines of production code; BUDGET in this file is {BUDGET}: raise it if they are worth it"


def test_lines_of_cuda_and_cpp_fit_128_columns():
    """ruff holds this for Python."""
    paths = [p for folder in ("kernels", "tests", "benchmarks") for p in (ROOT / folder).rglob("*")]
    files = {p: p.read_text().splitlines() for p in paths if p.suffix in {".cu", ".cuh", ".cpp", ".h"}}
    assert files
    assert [f"{path}:{n}" for path, lines in files.items() for n, line in enumerate(lines, 1) if len(line) > 128] == []


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_imports_of_benchmarks_exist(path):
    """No other test runs most of them: a name that moved would show on a GPU only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lowq", *FOLDERS):
            assert node.module
            names = vars(importlib.import_module(node.module))
            for alias in node.names:
                assert alias.name in names or importlib.util.find_spec(f"{node.module}.{alias.name}"), (node.module, alias.name)


def test_modules_that_tests_import_have_unique_names():
    """Several folders of helpers are on the path of one run: of two `judge.py` every test would get the one imported first."""
    helpers = [p for p in (ROOT / "tests").rglob("*.py") if not p.name.startswith(("test_", "__")) and p.name != "conftest.py"]
    result = sorted(p.stem for p in helpers)
    assert result
    assert [name for name in result if result.count(name) > 1] == []


def test_no_test_imports_from_a_conftest():
    """Each folder has one, and pytest keeps only the last one loaded: what is imported would depend on what ran before."""
    tests = (ROOT / "tests").rglob("*.py")
    assert [p.name for p in tests if re.search(r"^\s*(from|import) [\w.]*\bconftest\b", p.read_text(), re.MULTILINE)] == []


def test_no_result_names_a_path_of_the_machine_that_measured_it():
    named = [p.relative_to(ROOT) for p in (ROOT / "benchmarks" / "results").rglob("*.json") if '": "/' in p.read_text()]
    assert named == []


TOO_MANY_KINDS = {"Exception", "BaseException"}
OUR_MISTAKES = {"RuntimeError", "AttributeError", "NameError", "AssertionError"}  # what a bug of ours, or CUDA, raises


def caught(node: ast.ExceptHandler | ast.Call) -> set[str]:
    """Names of the exceptions that a handler or a `suppress(...)` takes; of a bare `except` all of them."""
    if isinstance(node, ast.Call):
        kinds = node.args
    elif node.type is None:
        return TOO_MANY_KINDS
    else:
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return {name for kind in kinds if (name := getattr(kind, "id", getattr(kind, "attr", None)))}


def swallowing(source: str) -> list[str]:
    """Places of a source that may hide an error, as "LINE: why not"."""
    result, lines = [], source.splitlines()
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "suppress"
        if not called and not isinstance(node, ast.ExceptHandler):
            continue
        body = [] if isinstance(node, ast.Call) else node.body
        if body and isinstance(body[-1], ast.Raise) and body[-1].exc is None:
            continue  # it cleans up
        every, ours = caught(node) & TOO_MANY_KINDS, caught(node) & OUR_MISTAKES
        raised = bool(body) and isinstance(body[-1], ast.Raise)
        used = {n.id for statement in body for n in ast.walk(statement) if isinstance(n, ast.Name)}
        if every and getattr(node, "name", None) not in used:
            result.append(f"{node.lineno}: every error is caught, and none is shown or raised")
        elif (every or (ours and not raised)) and "#" not in lines[node.lineno - 1]:
            result.append(f"{node.lineno}: no comment says what may come, and where it goes")
    return result


@pytest.mark.parametrize("package", FOLDERS)
def test_no_error_is_swallowed(package):
    """What is caught of every kind, or of the kinds that our own mistakes have, is kept, and a comment says where it goes."""
    result = [f"{path}:{why}" for whose, path in SOURCES if whose == package for why in swallowing(path.read_text())]
    assert result == []


@pytest.mark.parametrize(
    ("body", "hides"),
    [
        ("except Exception:\n    pass", True),
        ("except:\n    x = 1", True),
        ("except Exception as e:  # of the library: said\n    pass", True),
        ("except (ValueError, BaseException) as e:\n    say(e)", True),
        ("except Exception as e:\n    raise DamagedError('it cannot be read') from e", True),
        ("except AttributeError:\n    return None", True),
        ("except builtins.RuntimeError:\n    x = 1", True),
        ("except Exception as e:  # of the library: said\n    say(e)", False),
        ("except BaseException:\n    close()\n    raise", False),
        ("except AttributeError:  # a system without it\n    x = 1", False),
        ("except ValueError:\n    pass", False),
    ],
)
def test_the_rule_for_errors_catches_a_handler_that_hides_one(body, hides):
    assert bool(swallowing("def f():\n    try:\n        g()\n    " + body.replace("\n", "\n    "))) == hides
    assert swallowing("with suppress(Exception):  # whatever\n    g()")
    assert swallowing("with contextlib.suppress(RuntimeError):\n    g()")
    assert not swallowing("with suppress(OSError):\n    g()")
