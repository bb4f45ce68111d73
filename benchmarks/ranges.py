"""Run part of the tests on the oldest and newest versions of the libraries in pyproject.toml. Before a release.

    python benchmarks/ranges.py                       the oldest transformers in range and the newest there is
    python benchmarks/ranges.py 5.17.0 5.20.2 5.24.0  these

Each version but the installed one gets a virtual environment of its own under ~/.cache/lowq-ranges, over the environment that
runs this: that one's torch and all others of its packages, but transformers, and huggingface_hub where transformers asks for
another. So torch is the one that is here: run this where another is installed for its row. Results:
benchmarks/results/ranges.json, whose rows of other versions stay, and which docs/families.md shows. About five minutes a
version on two cores.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
from importlib.metadata import version as installed
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "ranges.json"
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lowq-ranges"
CLI = "tests/cli/test_"
PARTS = {  # what depends on transformers, by name in the table
    "families": ["tests/families"],
    "loading": [f"{CLI}{name}.py" for name in ("hf_load", "hf_quantizer", "hf_structure", "families")],
    "other libraries": [f"{CLI}ecosystem.py"],
    "eval": [f"{CLI}{name}.py" for name in ("perplexity", "compare")],
    "generate": [f"{CLI}{name}.py" for name in ("native_loader", "generate_native", "calibrate_families")],
    "processes": [f"{CLI}tensor_parallel.py"],
}
HUB = re.compile(r"Requires-Dist: (huggingface-hub[^;\n]*)$", re.MULTILINE)


def wanted() -> list[str]:
    """The oldest version that pyproject.toml allows, and the newest that the package index has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = next(r for r in map(Requirement, project["dependencies"]) if r.name == "transformers")
    line = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    listed = subprocess.run(line, capture_output=True, text=True, check=True).stdout.partition("Available versions: ")[2]
    inside = sorted(v for v in map(Version, listed.splitlines()[0].split(", ")) if v in asked.specifier)
    return [str(inside[0]), str(inside[-1])]


def environment(version: str) -> Path:
    """The Python of an environment with this transformers over the one that runs this, or of that one where it has it."""
    if version == installed("transformers"):
        return Path(sys.executable)
    folder = ENVIRONMENTS / version
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", folder], check=True)
    site = next(folder.glob("lib/*/site-packages"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, f"transformers=={version}"], check=True)
    metadata = next(site.glob("transformers-*.dist-info")) / "METADATA"
    hub = next(map(Requirement, HUB.findall(metadata.read_text())))
    if installed("huggingface_hub") not in hub.specifier:
        subprocess.run([*install, str(hub)], check=True)
    below = sysconfig.get_path("purelib")  # by `addsitedir`, so that an editable lowq there is found
    (site / "zz-over.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    (folder / "ready").touch()
    return python


def counts(python: Path, tests: list[str]) -> dict[str, int]:
    """How many of some tests came out how."""
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    line = [str(python), "-P", "-c", code, *tests, "--tb=line", "-rfE", "-p", "no:cacheprovider"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    last = done.stdout.strip().splitlines()[-1]
    found = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped|failed|error)", last)}
    if not found or found.keys() & {"failed", "error"}:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return found or {"error": 1}


def main(versions: list[str]) -> int:
    """Run PARTS on each version and write the rows; 1 if something failed."""
    known = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    rows = {(Version(row["transformers"]), row["torch"]): row for row in known}
    for version in versions or wanted():
        python = environment(version)
        parts = {}
        for name, tests in PARTS.items():
            parts[name] = counts(python, tests)
            print(version, name, parts[name], file=sys.stderr, flush=True)
        facts = {"transformers": version, "torch": installed("torch"), "date": time.strftime("%Y-%m-%d")}
        rows[Version(version), facts["torch"]] = facts | {"parts": parts}
        OUT.write_text(json.dumps({"rows": [rows[key] for key in sorted(rows)]}, indent=1) + "\n")
    return int(any(part.keys() & {"failed", "error"} for row in rows.values() for part in row["parts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
