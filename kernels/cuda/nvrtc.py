"""CUDA C++ to cubin: compiles template instances on demand by NVRTC and caches them on disk. Needs no GPU and no compiler.

NVRTC is found where NVIDIA's wheels put it (torch's CUDA wheels bring it) and called through ctypes: `cuda-core` would
add 0.2 s of import and 15 us a launch, and its bindings are an extra that `pip install cuda-core` leaves out.
Our device code includes no CUDA headers (types and intrinsics are inline PTX), so an instance compiles in 60 to 900 ms
and nothing but the one library is needed.

Cache: $XDG_CACHE_HOME/lowq/cubin/<key>, key = hash of the source and what it includes, expression, arch, options and NVRTC
version. Files are written under a temporary name and renamed, so two processes may start at once. A truncated file fails its
checksum and is compiled again. Without a writable home directory each process compiles for itself.
"""

import ctypes
import hashlib
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

from lowq_kernels.cuda.wgmma_headers import wgmma_headers
from lowq_packers.atomic import write_whole
from lowq_packers.errors import LowqError, NotFoundError, UnsupportedError
from lowq_packers.home import cache_dir
from lowq_packers.regular import read_regular

KERNELS = Path(__file__).parents[1]
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")

try:
    _lib = ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
except DynamicLibNotFoundError as e:
    raise ModuleNotFoundError(f"NVRTC is not installed; pip install nvidia-cuda-nvrtc ({e})", name="cuda.nvrtc") from e
_lib.nvrtcGetErrorString.restype = ctypes.c_char_p


class CompileError(UnsupportedError):
    """NVRTC refused one of lowq's kernels, or this NVRTC is too old for the GPU."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one template instance: `image` for `cuModuleLoadData`, `symbol` its mangled name, `log` of ptxas."""

    image: bytes
    symbol: str
    log: str

    @property
    def resources(self) -> dict[str, int]:
        """registers, stack, spill_stores, spill_loads and smem bytes, read from ptxas's log."""
        patterns = {"registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack frame"}
        patterns |= {"spill_stores": r"(\d+) bytes spill stores", "spill_loads": r"(\d+) bytes spill loads"}
        values = {k: re.search(pattern, self.log) for k, pattern in patterns.items()}
        if missing := [k for k, m in values.items() if m is None]:
            raise CompileError(f"ptxas's log of {self.symbol} does not say {', '.join(missing)}: {self.log!r}")
        smem = re.search(r"(\d+) bytes smem", self.log)
        return {k: int(m.group(1)) for k, m in values.items() if m} | {"smem": int(smem.group(1)) if smem else 0}


def _check(code: int, what: str) -> None:
    if code:
        raise CompileError(f"{what}: {_lib.nvrtcGetErrorString(code).decode()}")


@cache
def version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that is loaded."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@cache
def sources() -> dict[str, str]:
    """Every .cu and .cuh file of the package by name, and the generated headers: the files that NVRTC can include."""
    return {p.name: p.read_text() for p in sorted(KERNELS.rglob("*.cu*"))} | wgmma_headers()


@cache
def included(file: str) -> dict[str, str]:
    """A source and all files that it includes, by name."""
    files: dict[str, str] = {}
    queue = [file]
    while queue:
        name = queue.pop()
        if name not in files:
            files[name] = sources()[name]
            queue += re.findall(r'^#include "(\w+\.cuh)"', files[name], re.M)
    return files


def key(file: str, expression: str, arch: str) -> str:
    """A hash of everything that the machine code of an instance depends on."""
    h = hashlib.sha256(repr((version(), OPTIONS, arch, file, expression, sorted(included(file).items()))).encode())
    return h.hexdigest()[:40]


def _read(path: Path) -> Cubin | None:
    """A cached cubin, or None if there is none or its checksum does not match."""
    try:
        digest, blob = read_regular(path).split(b"\n", 1)
        if hashlib.sha256(blob).hexdigest().encode() != digest:
            return None
        symbol, size, rest = blob.split(b"\n", 2)
        log, image = rest[: int(size)], rest[int(size) :]
        return Cubin(image, symbol.decode(), log.decode())
    except (LowqError, ValueError):
        return None


def _write(path: Path, cubin: Cubin) -> None:
    log = cubin.log.encode()
    blob = b"%s\n%d\n%s%s" % (cubin.symbol.encode(), len(log), log, cubin.image)
    with suppress(OSError):  # a home directory that cannot be written to only costs the cache
        write_whole(path, hashlib.sha256(blob).hexdigest().encode() + b"\n" + blob)


@cache
def compiled(file: str, expression: str, arch: str) -> Cubin:
    """The cubin of one instance, e.g. ("tile_mma.cu", "tile_mma<4, 0, 128, ...>", "sm_90a"), from the cache if it is there.

    Raises CompileError with the compiler's log where NVRTC refuses the source.
    """
    path = None
    with suppress(NotFoundError):  # a user of no home
        path = cache_dir() / "cubin" / key(file, expression, arch)
    with _one_at_a_time[file, expression, arch]:  # if two threads want one kernel, the second finds it in the cache
        cubin = _read(path) if path else None
        if cubin is None:
            cubin = _compile(file, expression, arch)
            if path:
                _write(path, cubin)
    return cubin


_one_at_a_time: defaultdict[tuple[str, str, str], Lock] = defaultdict(Lock)


def _compile(file: str, expression: str, arch: str) -> Cubin:
    headers = {k: v for k, v in included(file).items() if k != file}
    names = (ctypes.c_char_p * len(headers))(*(k.encode() for k in headers))
    texts = (ctypes.c_char_p * len(headers))(*(v.encode() for v in headers.values()))
    program = ctypes.c_void_p()
    source = sources()[file].encode()
    _check(_lib.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), len(headers), texts, names), file)
    try:
        _check(_lib.nvrtcAddNameExpression(program, expression.encode()), expression)
        flags = [f"--gpu-architecture={arch}".encode(), *(o.encode() for o in OPTIONS)]
        code = _lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        log = _bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if code:
            hint = f"NVRTC {version()} cannot compile for {arch}; a newer nvidia-cuda-nvrtc may" if code == 5 else log.strip()
            raise CompileError(f"{expression} ({file}, {arch}) does not compile: {hint}")
        symbol = ctypes.c_char_p()
        _check(_lib.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol)), expression)
        assert symbol.value is not None
        return Cubin(_bytes(program, "CUBIN"), symbol.value.decode(), log)
    finally:
        _lib.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_lib, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw
