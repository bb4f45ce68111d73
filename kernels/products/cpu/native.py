"""The C++ of this folder as a shared library: built at the first use by the C++ compiler that is here, kept in the cache.

One library holds every instruction set of the machine's kind, each in its own translation unit with its own flags; which
one runs is asked of the CPU. $CXX names the compiler, else c++, g++ or clang++. Where none is, or it fails, or it has
no OpenMP, `library` is None, `why_not` says so, and torch's own products stay. LOWQ_CPU_ISA=avx2 forces an instruction set,
LOWQ_CPU_ISA=off none. The library's OpenMP is the one that torch has loaded already: the same threads.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

from lowq_packers.errors import NotFoundError
from lowq_packers.home import cache_dir

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
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as args.h numbers them


PRODUCT = 3  # of args.h's calls; decode/cpu.py has the others
noting = threading.local()  # .calls: a list of what this thread calls, for `repeated`


class Call(ctypes.Structure):
    """args.h's struct."""

    _fields_ = (("what", ctypes.c_int32), ("dtype", ctypes.c_int32), ("args", ctypes.c_void_p))


class Args(ctypes.Structure):
    """args.h's struct."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "words", "scales", "zeros", "bias", "most", "y")]
        + [(name, ctypes.c_int32) for name in ("M", "N", "K", "bits", "group", "groups", "chunks")]
        + [(name, ctypes.c_int32) for name in ("block", "blocks", "dtype", "meta", "digits", "threads")]
        + [("mid", ctypes.c_float)]
    )


def compiler() -> str | None:
    """The C++ compiler to use, or None."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def is_to_be_built() -> bool:
    """Whether the first product will wait for the compiler: some 15 s of a core."""
    units, cxx = UNITS.get(platform.machine().lower()), compiler()
    if _found.cache_info().currsize or units is None or cxx is None or os.environ.get("LOWQ_CPU_ISA") == "off":
        return False
    try:
        return not _place(cxx, units, cache_dir() / "cpu", ()).exists()
    except (OSError, NotFoundError, subprocess.SubprocessError):
        return False


@cache
def _version(cxx: str) -> str:
    return subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout


def _place(cxx: str, units: dict[str, tuple[str, ...]], folder: Path, extra: tuple[str, ...]) -> Path:
    """Where the library of these sources and this compiler is kept."""
    sources = [p.read_text() for p in sorted(HERE.iterdir()) if p.suffix in (".cpp", ".h")]
    key = hashlib.sha256(repr((_version(cxx), FLAGS, extra, units, sources)).encode()).hexdigest()[:24]
    return folder / f"lowq_cpu_{key}.so"


def build(cxx: str, units: dict[str, tuple[str, ...]], folder: Path, extra: tuple[str, ...] = ()) -> Path:
    """The library, from `folder` if it is there. Raises OSError or CalledProcessError where it cannot be built."""
    path = _place(cxx, units, folder, extra)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        running = [
            (subprocess.Popen([*args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), args)
            for name, flags in units.items()
            for args in [(cxx, *FLAGS, *extra, *flags, "-c", str(HERE / name), "-o", f"{work}/{name}.o")]
        ]
        for process, args in running:
            log, _ = process.communicate(timeout=BUILD_SECONDS)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, args, log)
        objects = [f"{work}/{name}.o" for name in units]
        link = [cxx, "-shared", *FLAGS, *extra, *objects, "-o", f"{work}/done"]
        subprocess.run(link, check=True, capture_output=True, text=True)
        os.replace(f"{work}/done", path)  # whole or not at all: two processes may build at once
    return path


@cache
def _found() -> tuple[ctypes.CDLL | None, int, str]:
    """(library, number of the instruction set, its name), or (None, 0, why not)."""
    wanted, units, cxx = os.environ.get("LOWQ_CPU_ISA", ""), UNITS.get(platform.machine().lower()), compiler()
    if wanted == "off":
        return None, 0, "LOWQ_CPU_ISA=off"
    if units is None:
        return None, 0, f"none are written for {platform.machine()}"
    if cxx is None:
        return None, 0, "no C++ compiler is here; install g++ or clang"
    try:
        lib = ctypes.CDLL(str(build(cxx, units, cache_dir() / "cpu")))
    except (OSError, NotFoundError, subprocess.SubprocessError) as e:
        log = str(getattr(e, "output", None) or getattr(e, "stderr", None) or e).strip()
        return None, 0, f"{cxx} does not build them: {log.splitlines()[0]}"
    found = _sets(lib)
    for i, (name, here) in enumerate(found):
        if here and wanted in ("", name):
            return lib, i, name
    names = ", ".join(name for name, _ in found)
    return None, 0, f"LOWQ_CPU_ISA={wanted} is none that this CPU has of {names}" if wanted else f"this CPU has none of {names}"


def _sets(lib: ctypes.CDLL) -> list[tuple[str, bool]]:
    lib.lowq_cpu_set.restype = ctypes.c_char_p
    here, found = ctypes.c_int(), list[tuple[str, bool]]()
    while name := lib.lowq_cpu_set(len(found), ctypes.byref(here)):
        found.append((name.decode(), bool(here.value)))
    return found


def sets() -> list[tuple[str, bool]]:
    """The instruction sets that the library has code for, best first, and whether this CPU has them."""
    lib = library()
    return _sets(lib) if lib else []


def library() -> ctypes.CDLL | None:
    """The library, built on the first call (about 15 s of CPU time), or None."""
    return _found()[0]


def isa() -> tuple[int, str]:
    """Number and name of the instruction set in use."""
    return _found()[1:]


def why_not() -> str | None:
    """Why there is no library, or None."""
    return None if _found()[0] else _found()[2]


def product(tensors: dict[str, torch.Tensor | None], meta: torch.dtype, **numbers: float) -> None:
    """Fill args.h's struct and run it; x and y among `tensors` share a dtype, weights' companions have `meta`."""
    run(PRODUCT, Args, tensors["y"].dtype, tensors, meta=DTYPES[meta], **numbers)  # type: ignore[union-attr]


def run(
    what: int, kind: type[ctypes.Structure], dtype: torch.dtype, tensors: dict[str, torch.Tensor | None], **numbers: float
) -> None:
    """Fill a struct of args.h and do what it says; noted where `repeated` listens in this thread."""
    pointers = {name: None if t is None else t.data_ptr() for name, t in tensors.items()}
    args = kind(**pointers, **numbers, dtype=DTYPES[dtype], threads=torch.get_num_threads())
    call = Call(what, DTYPES[dtype], ctypes.addressof(args))
    library().lowq_cpu_run(isa()[0], ctypes.byref(call), 1)  # type: ignore[union-attr]  # kernels refuse without one
    if (calls := getattr(noting, "calls", None)) is not None:
        calls.append((call, args, tensors))
