"""Builds this folder's C++ into a shared library with the machine's compiler: for a wheel (setup.py) or at the first use.

One library holds all instruction sets of the machine's architecture, each in its own translation unit with its own flags. The
compiler is $CXX, else c++, g++ or clang++. The library's name is a hash of its sources and flags. This file needs only Python:
where a wheel is built there is no torch.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

Units = dict[str, tuple[str, ...]]
Advance = Callable[[float], object]

HERE = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden")
X86 = {
    "api.cpp": (),
    "bf16.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mf16c"),
    "avx512.cpp": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mf16c", "-mfma"),
    "avx2.cpp": ("-mavx2", "-mf16c", "-mfma"),
}
ARM = {"api.cpp": (), "neon.cpp": ("-march=armv8.2-a+dotprod+fp16",)}
UNITS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
BUILD_SECONDS = 900  # timeout of a build: its 52 to 60 s of processor time may have to wait for other processes
# How long a build takes by the cores it has, as a message says it. Measured in seconds: 18 to 48 on two free cores, 30 to 33 of
# them with g++ 12 at 2.6 GHz; there 60 on one core, and 63 on two that two other processes kept busy.
USUAL_SECONDS = {1: "about a minute", 2: "20 to 50 s"}
SAMPLE = "bf16.cpp"  # compiled first, to estimate the rest: 0.7 to 1.0 s there
# Cores -> how many times as long as SAMPLE the whole build takes: 70 to 81 on one core, 30 to 41 on two, in the builds above.
TIMES_SAMPLE = {1: 78, 2: 36}
EXPECTED_SECONDS = 48.0  # the estimate where SAMPLE is not compiled, for NEON, which was not measured: the longest of the above
TELL_SECONDS = 0.2  # interval of progress reports
MOST_SHARE = 0.9  # max. share that is reported before the end: a build that outlasts its estimate goes on for seconds


def units_here() -> Units | None:
    """The translation units for this machine's architecture, or None."""
    return UNITS.get(platform.machine().lower())


def compiler() -> str | None:
    """The C++ compiler to use, or None."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cores() -> int:
    """How many cores a build can use, 1 or 2: its two large units take most of the time."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, 2)


@cache
def _version(cxx: str) -> str:
    return subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout


def name_of(*facts: object) -> str:
    """The library's file name: a hash of the sources, flags and further facts."""
    sources = [p.read_text() for p in sorted(HERE.iterdir()) if p.suffix in (".cpp", ".h")]
    return f"lowq_cpu_{hashlib.sha256(repr((FLAGS, sources, *facts)).encode()).hexdigest()[:24]}.so"


def whole_name(cxx: str, units: Units) -> str:
    """The file name of the library that this compiler builds."""
    return name_of(_version(cxx), units)


def carried() -> Path | None:
    """The library that a wheel installed next to these sources, or None."""
    path = HERE / name_of(platform.machine())
    return path if path.exists() else None


def carry(folder: Path) -> bool:
    """Build into the folder of a wheel if a compiler can; returns whether it did."""
    units, cxx = units_here(), compiler()
    if units is None or cxx is None or os.environ.get("LOWQ_CPU_ISA") == "off":
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            os.replace(build(cxx, units, Path(work)), folder / name_of(platform.machine()))
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def build(cxx: str, units: Units, folder: Path, advance: Advance | None = None) -> Path:
    """Compile and link in `folder`; the library there.

    advance: called with the finished share, 0 to 1, estimated from the time that SAMPLE takes here.
    Raises OSError or SubprocessError if it cannot be built.
    """
    first, began = SAMPLE in units, time.monotonic()
    if first:
        _wait([_start(cxx, SAMPLE, units[SAMPLE], folder)], lambda: None)
    expected = (time.monotonic() - began) * TIMES_SAMPLE[cores()] if first else EXPECTED_SECONDS

    def tell() -> None:
        if advance:
            spent = time.monotonic() - began
            advance(min(spent / expected, MOST_SHARE))

    _wait([_start(cxx, name, flags, folder) for name, flags in units.items() if name != SAMPLE], tell)
    path = folder / whole_name(cxx, units)
    link = [cxx, "-shared", *FLAGS, *(f"{folder}/{name}.o" for name in units), "-o", str(path)]
    subprocess.run(link, check=True, capture_output=True, text=True)
    return path


def _start(cxx: str, name: str, flags: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
    line = [cxx, *FLAGS, *flags, "-c", str(HERE / name), "-o", f"{folder}/{name}.o"]
    with open(f"{folder}/{name}.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, text=True)


def _wait(running: list[subprocess.Popen[str]], tell: Callable[[], None]) -> None:
    """Wait for compilers. Raises CalledProcessError with the log of one that failed, TimeoutExpired; none is left running."""
    try:
        end = time.monotonic() + BUILD_SECONDS
        for process in running:
            while (code := _code_within(process, TELL_SECONDS)) is None:
                tell()
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(process.args, BUILD_SECONDS)
            if code:
                log = Path(str(process.args[-1])).with_suffix(".log")  # type: ignore[index]
                raise subprocess.CalledProcessError(code, process.args, log.read_text(errors="replace"))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def _code_within(process: subprocess.Popen[str], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
