"""A wheel's CPU kernels: compiled when it is made, used by a machine without a compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import forking
import pytest

from lowq_kernels.products.cpu import building, native

ROOT = Path(__file__).parents[2]
# What is asked of a compiler, without the 15 s: "compiles" by an empty file, "links" by the library that the tests have built.
FAKE = """#!/bin/sh
[ $1 = --version ] && exit 0
linked=; for a in "$@"; do [ "$a" = -shared ] && linked=1; done
while [ "$1" != -o ]; do shift; done
if [ $linked ]; then cp {library} "$2"; else : > "$2"; fi
"""
pytestmark = pytest.mark.skipif(native.library() is None, reason=f"own CPU kernels are not built: {native.why_not()}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The name of a wheel of this tree, and the folder where it was unpacked."""
    made = tmp_path_factory.mktemp("wheel")
    tree, fake = made / "tree", made / "c++"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "benchmarks", "tests", "docs"))
    fake.write_text(FAKE.format(library=native.library()._name))
    fake.chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(made), str(tree)]
    env = {k: v for k, v in os.environ.items() if k != "LOWQ_CPU_ISA"} | {"CXX": str(fake)}
    subprocess.run(command, check=True, capture_output=True, env=env)
    wheel = next(made.glob("lowq-*.whl"))
    zipfile.ZipFile(wheel).extractall(made / "installed")
    return wheel.name, made / "installed"


def ask(folder, cache):
    """Instruction set, why a product would wait for a compiler, why there is no library: where no compiler is."""
    hidden = {"PYTHONPATH": str(folder), "PATH": "", "XDG_CACHE_HOME": str(cache)}
    done = forking.run(forking.ask_for_library, env=hidden)
    return done.stdout.strip().split("|")[1:]


def test_a_wheel_brings_them_to_a_machine_without_a_compiler(installed, tmp_path):
    name, folder = installed
    assert not name.endswith("-any.whl")
    best = next(name for name, here in native.sets() if here)
    assert ask(folder, tmp_path) == [best, "-", "None"]
    assert not list(tmp_path.iterdir())  # nothing was built or kept


def test_other_sources_do_not_take_a_wheels_library_for_theirs(installed, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(installed[1], copied)
    with (copied / "lowq_kernels/products/cpu/args.h").open("a") as source:
        source.write("// another struct\n")
    assert ask(copied, tmp_path)[2] == "no C++ compiler is here; install g++ or clang"


def test_a_wheels_library_that_does_not_load_is_reported(installed, tmp_path):
    copied = tmp_path / "copied"
    shutil.copytree(installed[1], copied)
    next((copied / "lowq_kernels/products/cpu").glob("*.so")).write_bytes(b"for another machine")
    assert ask(copied, tmp_path)[2].startswith("the wheel's library does not load: ")


def test_where_nothing_compiles_a_wheel_is_for_every_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for cxx in ("", "/bin/false"):
        monkeypatch.setenv("CXX", cxx)
        assert (building.compiler() or "") == cxx
        assert not building.carry(tmp_path)
    assert not list(tmp_path.iterdir())
