"""The shared library of this folder's C++, by the compiler that is here: at a wheel's making (setup.py) or at the first use.

One library holds every instruction set of the machine's kind, each in its own translation unit with its own flags. $CXX names
the compiler, else c++, g++ or clang++. The library's name is a hash of its sources, so that none is taken for another's. Needs
nothing but Python: where a wheel is made there is no torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

Units = dict[str, tuple[str, ...]]

HERE = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden")
X86 = {
    "api.cpp": (),
    "bf16.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16"),
    "avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mf16c", "-mfma"),
    "avx2.cpp": ("-mavx2", "-mf16c", "-mfma"),
}
ARM = {"api.cpp": (), "neon.cpp": ("-march=armv8.2-a+dotprod+fp16",)}
UNITS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
BUILD_SECONDS = 300


def units_here() -> Units | None:
    """The translation units for a machine of this kind, or None."""
    return UNITS.get(platform.machine().lower())


def compiler() -> str | None:
    """The C++ compiler to use, or None."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def _version(cxx: str) -> str:
    return subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout


def name_of(*facts: object) -> str:
    """The file's name of the library of these sources, flags and further facts."""
    sources = [p.read_text() for p in sorted(HERE.iterdir()) if p.suffix in (".cpp", ".h")]
    return f"lowq_cpu_{hashlib.sha256(repr((FLAGS, sources, *facts)).encode()).hexdigest()[:24]}.so"


def whole_name(cxx: str, units: Units) -> str:
    """... as this compiler builds it."""
    return name_of(_version(cxx), units)


def carried() -> Path | None:
    """The library that a wheel has put beside its sources, or None."""
    path = HERE / name_of(platform.machine())
    return path if path.exists() else None


def carry(folder: Path) -> bool:
    """Build into the folder of a wheel, where a compiler is that can. Whether it could."""
    units, cxx = units_here(), compiler()
    if units is None or cxx is None or os.environ.get("LOWQ_CPU_ISA") == "off":
        return False
    try:
        os.replace(build(cxx, units, folder), folder / name_of(platform.machine()))
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _scratch(at: Path) -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(dir=at)


def build(
    cxx: str, units: Units, folder: Path, scratch: Callable[[Path], AbstractContextManager[str | Path]] = _scratch
) -> Path:
    """The library, from `folder` if it is there; made in a folder that `scratch` makes there for a while.

    Raises OSError or CalledProcessError where it cannot be built.
    """
    path = folder / whole_name(cxx, units)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with scratch(folder) as work:
        running = [
            (subprocess.Popen([*args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), args)
            for name, flags in units.items()
            for args in [(cxx, *FLAGS, *flags, "-c", str(HERE / name), "-o", f"{work}/{name}.o")]
        ]
        for process, args in running:
            log, _ = process.communicate(timeout=BUILD_SECONDS)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, args, log)
        objects = [f"{work}/{name}.o" for name in units]
        link = [cxx, "-shared", *FLAGS, *objects, "-o", f"{work}/done"]
        subprocess.run(link, check=True, capture_output=True, text=True)
        os.replace(f"{work}/done", path)  # whole or not at all: two processes may build at once
    return path
