"""The C++ of this folder as a shared library (`building`): from a wheel, else built at the first use and cached.

A cached library that is damaged, or that another user could have written, is built again. The CPU decides which instruction set
runs. With neither a wheel's library nor a compiler that can build one, `library` returns None, `why_not` gives the reason, and
torch computes the products. LOWQ_CPU_ISA=avx2 forces an instruction set, LOWQ_CPU_ISA=off switches the library off. It uses
the OpenMP that torch has loaded, hence the same threads.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from lowq_kernels.products.cpu.building import Advance, Units, build, carried, compiler, units_here, whole_name
from lowq_kernels.products.cpu.team import threads
from lowq_packers.atomic import alone, replacing, scratch
from lowq_packers.errors import DamagedError, LowqError
from lowq_packers.home import cache_dir, check_own
from lowq_packers.regular import open_bounded, read_regular, read_text

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # numbers of dtypes in args.h
SCALES = {"e4m3": 3, "e8m0": 4}
BETWEEN = ("delta", "mamba2", "short_conv", "update", "open", "prepare")
MIXTURES = ("route", "experts", "latent", "codes")
NAMES = ("add_norm", "gated", "attend", "product", *BETWEEN, *MIXTURES)  # names of args.h's calls in a profile
# as args.h numbers them
ADD_NORM, GATED, ATTEND, PRODUCT, DELTA, MAMBA2, SHORT_CONV, UPDATE, OPEN, PREPARE, ROUTE, EXPERTS, LATENT, CODES = range(
    len(NAMES)
)
MOST_BYTES = 1 << 26  # max. size of a library file that is read; it has 0.7 MB
NONE = "none is there"
SWITCHED_OFF = "LOWQ_CPU_ISA=off"
DIGEST = ".sha256"  # suffix of the file with a library's hash
_watch: Advance | None = None  # receives the progress of a build
noting = threading.local()  # .calls: a list of this thread's calls, which `repeated` records


def struct(name: str, *first: tuple[str, Any], **fields: str) -> type[ctypes.Structure]:
    """A struct of args.h: fields with their ctypes, then names of further fields by type, as `KINDS` has them."""
    members = [*first, *((field, KINDS[kind]) for kind, names in fields.items() for field in names.split())]
    return type(name, (ctypes.Structure,), {"_fields_": members})


KINDS = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
Call = struct("Call", i="what dtype", p="args")
Args = struct(
    "Args",
    p="x words scales zeros bias y table factor",
    i="M N K bits group groups chunks block blocks dtype meta digits threads scale tables apart",
    f="mid",
)


def why_built() -> str:
    """Why a library must be built: it is missing, damaged, or another user's; "" if it need not be built."""
    units, cxx = units_here(), compiler()
    if _found.cache_info().currsize or carried() or units is None or cxx is None or os.environ.get("LOWQ_CPU_ISA") == "off":
        return ""
    try:
        _check(cache_dir() / "cpu" / whole_name(cxx, units))
    except DamagedError as e:
        return str(e)
    except (LowqError, OSError, subprocess.SubprocessError):
        return NONE
    return ""


def _check(path: Path) -> None:
    """Raise LowqError unless the library at `path` belongs to this user alone and is, byte for byte, the one that was built."""
    fd = open_bounded(path, MOST_BYTES)
    try:
        check_own(path, fd)
        digest = read_text(path.with_suffix(DIGEST), 1024) if path.with_suffix(DIGEST).exists() else ""
        if hashlib.sha256(os.pread(fd, MOST_BYTES, 0)).hexdigest() != digest:
            raise DamagedError(f"{path} is not the file that was built")
    finally:
        os.close(fd)


def _built(cxx: str, units: Units) -> Path:
    """The cached library; one process at a time builds it if it is missing or unsound."""
    folder = cache_dir() / "cpu"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / whole_name(cxx, units)
    with suppress(LowqError):  # a sound library does not wait for a process that builds another one
        _check(path)
        return path
    with alone(folder):
        try:
            _check(path)
            return path
        except LowqError:
            if path.is_dir():
                shutil.rmtree(path)
        with scratch(folder, "building") as work:
            image = read_regular(build(cxx, units, work, _watch), MOST_BYTES)
        digest = hashlib.sha256(image).hexdigest().encode()
        for to, content in ((path.with_suffix(DIGEST), digest), (path, image)):
            with replacing(to, sync=True) as whole:
                whole.write_bytes(content)
                whole.chmod(0o700)
        return path


@cache
def _found() -> tuple[ctypes.CDLL | None, int, str]:
    """(library, number of the instruction set, its name), or (None, 0, why not)."""
    forced, units, cxx, ready = os.environ.get("LOWQ_CPU_ISA", ""), units_here(), compiler(), carried()
    if forced == "off":
        return None, 0, SWITCHED_OFF
    if units is None:
        return None, 0, f"none are written for {platform.machine()}"
    if cxx is None and ready is None:
        return None, 0, "no C++ compiler is here; install g++ or clang"
    try:
        path = ready or _built(str(cxx), units)
    except (OSError, LowqError, subprocess.SubprocessError) as e:
        log = str(getattr(e, "output", None) or getattr(e, "stderr", None) or e).strip()
        if isinstance(e, OSError) and e.filename not in (None, cxx):
            return None, 0, f"{e.filename} cannot be written: {e.strerror}; name another cache folder: XDG_CACHE_HOME=DIR"
        whose = f"{cxx} does not build them" if isinstance(e, subprocess.SubprocessError) else "they cannot be stored"
        return None, 0, f"{whose}: {(log or repr(e)).splitlines()[0]}"
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        whose, way_out = f"{path} does not load", "; name another cache folder: XDG_CACHE_HOME=DIR"
        if ready:
            whose, way_out = "the wheel's library does not load", ""
        return None, 0, f"{whose}: {str(e).splitlines()[0]}{way_out}"
    available = _sets(lib)
    for i, (name, here) in enumerate(available):
        if here and forced in ("", name):
            return lib, i, name
    names = ", ".join(name for name, _ in available)
    return (
        None,
        0,
        f"LOWQ_CPU_ISA={forced} is not available on this CPU, of {names}" if forced else f"this CPU has none of {names}",
    )


def _sets(lib: ctypes.CDLL) -> list[tuple[str, bool]]:
    lib.lowq_cpu_set.restype = ctypes.c_char_p
    here, available = ctypes.c_int(), list[tuple[str, bool]]()
    while name := lib.lowq_cpu_set(len(available), ctypes.byref(here)):
        available.append((name.decode(), bool(here.value)))
    return available


def sets() -> list[tuple[str, bool]]:
    """The instruction sets that the library has code for, best first, and whether this CPU has them."""
    lib = library()
    return _sets(lib) if lib else []


def forget() -> None:
    """Look for the library again at the next call, as where the compiler, the cache folder or LOWQ_CPU_ISA has changed."""
    _found.cache_clear()


def library() -> ctypes.CDLL | None:
    """The library, built on the first call (60 s of processor time), or None."""
    return _found()[0]


def built(advance: Advance) -> None:
    """Have the library built now, where it has to be; `advance` is called with the share that is done."""
    global _watch
    _watch = advance
    try:
        _found()
    finally:
        _watch = None


def isa() -> tuple[int, str]:
    """Number and name of the instruction set in use."""
    return _found()[1:]


def why_not() -> str | None:
    """Why there is no library, or None."""
    return None if _found()[0] else _found()[2]


def refuse(call: object) -> str | None:
    """Why no kernel of the library takes any call, or None."""
    return f"lowq's CPU kernels are not in use: {why}" if (why := why_not()) else None


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether the library is built and takes these tensors: contiguous, in its dtypes, without a gradient to record."""
    return library() is not None and all(t is None or _plain(t) for t in tensors)


def _plain(t: torch.Tensor) -> bool:
    return t.is_contiguous() and t.dtype in DTYPES and not (t.requires_grad and torch.is_grad_enabled())


def is_watched() -> bool:
    """Whether torch's profiler is running; it does not see the library's work."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def product(tensors: dict[str, torch.Tensor | None], meta: torch.dtype, **numbers: float) -> None:
    """Fill args.h's struct and run it; x and y among `tensors` share a dtype, weights' companions have `meta`."""
    run(PRODUCT, Args, tensors["y"].dtype, tensors, meta=DTYPES[meta], **numbers)  # type: ignore[union-attr]


def run(
    what: int,
    kind: type[ctypes.Structure],
    dtype: torch.dtype,
    tensors: dict[str, torch.Tensor | None],
    **numbers: float | ctypes.Structure,
) -> None:
    """Fill a struct of args.h and run it; recorded if `repeated` is recording in this thread."""
    pointers = {name: None if t is None else t.data_ptr() for name, t in tensors.items()}
    args = kind(**pointers, **numbers, dtype=DTYPES[dtype], threads=threads())
    call = Call(what, DTYPES[dtype], ctypes.addressof(args))
    with record_function(f"lowq::{NAMES[what]}") if is_watched() else nullcontext():
        library().lowq_cpu_run(isa()[0], ctypes.byref(call), 1)  # type: ignore[union-attr]  # kernels refuse without one
    if (calls := getattr(noting, "calls", None)) is not None:
        calls.append((call, args, tensors))
