"""The C++ of this folder as a shared library (`building`): a wheel's, else built at the first use and kept in the cache.

Which instruction set runs is asked of the CPU. Where there is neither a wheel's library nor a compiler that builds one,
`library` is None, `why_not` says so, and torch's own products stay. LOWQ_CPU_ISA=avx2 forces an instruction set,
LOWQ_CPU_ISA=off none. The library's OpenMP is the one that torch has loaded already: the same threads.
"""

import ctypes
import os
import platform
import subprocess
import threading
from contextlib import nullcontext
from functools import cache, partial

import torch
from torch.profiler import record_function

from lowq_kernels.products.cpu.building import build, carried, compiler, units_here, whole_name
from lowq_kernels.products.cpu.team import threads
from lowq_packers.atomic import scratch
from lowq_packers.errors import NotFoundError
from lowq_packers.home import cache_dir

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as args.h numbers them
SCALES = {"e4m3": 3, "e8m0": 4}
NAMES = ("add_norm", "gated", "attend", "product")  # args.h's calls, as a profile shows them
PRODUCT = 3  # decode/cpu.py has the others
noting = threading.local()  # .calls: a list of what this thread calls, for `repeated`


class Call(ctypes.Structure):
    """args.h's struct."""

    _fields_ = (("what", ctypes.c_int32), ("dtype", ctypes.c_int32), ("args", ctypes.c_void_p))


class Args(ctypes.Structure):
    """args.h's struct."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "words", "scales", "zeros", "bias", "most", "y", "table", "factor")]
        + [(name, ctypes.c_int32) for name in ("M", "N", "K", "bits", "group", "groups", "chunks")]
        + [
            (name, ctypes.c_int32)
            for name in ("block", "blocks", "dtype", "meta", "digits", "threads", "scale", "tables", "apart")
        ]
        + [("mid", ctypes.c_float)]
    )


def is_to_be_built() -> bool:
    """Whether the first product will wait for the compiler: some 15 s of a core."""
    units, cxx = units_here(), compiler()
    if _found.cache_info().currsize or carried() or units is None or cxx is None or os.environ.get("LOWQ_CPU_ISA") == "off":
        return False
    try:
        return not (cache_dir() / "cpu" / whole_name(cxx, units)).exists()
    except (OSError, NotFoundError, subprocess.SubprocessError):
        return False


@cache
def _found() -> tuple[ctypes.CDLL | None, int, str]:
    """(library, number of the instruction set, its name), or (None, 0, why not)."""
    wanted, units, cxx, ready = os.environ.get("LOWQ_CPU_ISA", ""), units_here(), compiler(), carried()
    if wanted == "off":
        return None, 0, "LOWQ_CPU_ISA=off"
    if units is None:
        return None, 0, f"none are written for {platform.machine()}"
    if cxx is None and ready is None:
        return None, 0, "no C++ compiler is here; install g++ or clang"
    try:
        lib = ctypes.CDLL(str(ready or build(str(cxx), units, cache_dir() / "cpu", partial(scratch, name="building"))))
    except (OSError, NotFoundError, subprocess.SubprocessError) as e:
        log = str(getattr(e, "output", None) or getattr(e, "stderr", None) or e).strip()
        whose = f"{cxx} does not build them" if ready is None else "the wheel's library does not load"
        return None, 0, f"{whose}: {log.splitlines()[0]}"
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


def is_watched() -> bool:
    """Whether torch's profiler is at work, which would not see what the library does."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def product(tensors: dict[str, torch.Tensor | None], meta: torch.dtype, **numbers: float) -> None:
    """Fill args.h's struct and run it; x and y among `tensors` share a dtype, weights' companions have `meta`."""
    run(PRODUCT, Args, tensors["y"].dtype, tensors, meta=DTYPES[meta], **numbers)  # type: ignore[union-attr]


def run(
    what: int, kind: type[ctypes.Structure], dtype: torch.dtype, tensors: dict[str, torch.Tensor | None], **numbers: float
) -> None:
    """Fill a struct of args.h and do what it says; noted where `repeated` listens in this thread."""
    pointers = {name: None if t is None else t.data_ptr() for name, t in tensors.items()}
    args = kind(**pointers, **numbers, dtype=DTYPES[dtype], threads=threads())
    call = Call(what, DTYPES[dtype], ctypes.addressof(args))
    with record_function(f"lowq::{NAMES[what]}") if is_watched() else nullcontext():
        library().lowq_cpu_run(isa()[0], ctypes.byref(call), 1)  # type: ignore[union-attr]  # kernels refuse without one
    if (calls := getattr(noting, "calls", None)) is not None:
        calls.append((call, args, tensors))
