"""CUDA C++ to cubin: templates compiled on demand by NVRTC, kept in a cache on disk. Needs no GPU and no compiler.

NVRTC is found where NVIDIA's wheels put it (torch's CUDA wheels bring it) and called through ctypes: `cuda-core` would
add 0.2 s of import and 15 us a launch, and its bindings are an extra that `pip install cuda-core` leaves out.
Our device code includes no CUDA headers (types and intrinsics are inline PTX), so an instance compiles in 60 to 900 ms
and nothing but the one library is needed.

Cache: $XDG_CACHE_HOME/lowq/cubin/<key>, key = hash of every source, expression, arch, options and NVRTC
version. Files are written beside and renamed, so two processes may start at once; a truncated file fails its checksum
and is compiled anew; a home that is not there or cannot be written to only costs the compile in each process.
"""

import ctypes
import hashlib
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

from lowq_packers.errors import UnsupportedError

HERE = Path(__file__).parent
FOLDERS = (HERE, HERE.parent / "decode")  # where device code lies
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
WGMMA_COLUMNS = (16, 32, 64, 96, 128, 192, 256)
WGMMA_FP8_COLUMNS = (8, 16, 32, 64, 128, 192)
WGMMA8_COLUMNS = (8, 16, 24, 32, 64, 96, 128)

try:
    _lib = ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
except DynamicLibNotFoundError as e:
    raise ModuleNotFoundError(f"NVRTC is not installed; pip install nvidia-cuda-nvrtc ({e})", name="cuda.nvrtc") from e
_lib.nvrtcGetErrorString.restype = ctypes.c_char_p


class CompileError(UnsupportedError):
    """NVRTC refused a kernel of ours, or this NVRTC is too old for the GPU."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one template instance: `image` for `cuModuleLoadData`, `symbol` its mangled name, `log` of ptxas."""

    image: bytes
    symbol: str
    log: str

    @property
    def resources(self) -> dict[str, int]:
        """registers, stack, spill_stores, spill_loads and smem bytes, read from ptxas's log."""
        found = {"registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack frame"}
        found |= {"spill_stores": r"(\d+) bytes spill stores", "spill_loads": r"(\d+) bytes spill loads"}
        values = {k: re.search(pattern, self.log) for k, pattern in found.items()}
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
    """Every .cu and .cuh file of `FOLDERS` by name, and the one header that is generated: what NVRTC can include."""
    return {p.name: p.read_text() for folder in FOLDERS for p in sorted(folder.glob("*.cu*"))} | {
        "wgmma.cuh": _wgmma_header(),
        "wgmma_fp8.cuh": _wgmma_fp8_header(),
        "wgmma8.cuh": _wgmma8_header(),
    }


def _wgmma_header() -> str:
    """Wgmma<T, NB>::run(d, a, b): d[NB / 2] += a (64 x 16, registers) times b (16 x NB, shared), one instruction each; `first`
    is the same with = for +=.

    Inline PTX wants every accumulator register named, up to 128 of them: text for a loop, not for a person.
    """
    lines = ["#pragma once", "template <int T, int NB> struct Wgmma;"]
    for T, name in enumerate(("f16", "bf16")):
        for nb in WGMMA_COLUMNS:
            n = nb // 2
            d = ", ".join(f"%{i}" for i in range(n))
            a = ", ".join(f"%{n + i}" for i in range(4))
            inputs = ", ".join([*(f'"r"(a[{i}])' for i in range(4)), '"l"(b)'])
            lines.append(f"template <> struct Wgmma<{T}, {nb}> {{")
            for function, kind, add in (("run", "+f", 1), ("first", "=f", 0)):
                outputs = ", ".join(f'"{kind}"(d[{i}])' for i in range(n))
                text = f"wgmma.mma_async.sync.aligned.m64n{nb}k16.f32.{name}.{name} {{{d}}}, {{{a}}}, %{n + 4}, {add}, 1, 1, 0;"
                lines.append(
                    f"static __device__ __forceinline__ void {function}(float (&d)[{n}], const unsigned (&a)[4], "
                    f'unsigned long long b) {{ asm volatile("{text}" : {outputs} : {inputs}); }}'
                )
            lines.append("};")
    return "\n".join(lines) + "\n"


def _wgmma_fp8_header() -> str:
    """WgmmaFp8<NB>::run(d, a, b, add): d[NB / 2] = (add ? d : 0) + a (64 x 32) times b (32 x NB), e4m3 in shared memory."""
    lines = ["#pragma once", "template <int NB> struct WgmmaFp8;"]
    for nb in WGMMA_FP8_COLUMNS:
        n = nb // 2
        d = ", ".join(f"%{i}" for i in range(n))
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(n))
        text = (
            f"{{.reg .pred add; setp.ne.s32 add, %{n + 2}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{nb}k32.f32.e4m3.e4m3 {{{d}}}, %{n}, %{n + 1}, add, 1, 1;}}"
        )
        lines.append(
            f"template <> struct WgmmaFp8<{nb}> {{ static __device__ __forceinline__ void run(float (&d)[{n}], "
            f"unsigned long long a, unsigned long long b, int add) "
            f'{{ asm volatile("{text}" : {outputs} : "l"(a), "l"(b), "r"(add)); }} }};'
        )
    return "\n".join(lines) + "\n"


def _wgmma8_header() -> str:
    """Wgmma8<INT8, NB>::run(d, a, b, add): d[NB / 2] = (add ? d : 0) + a (64 x 32, registers) times b (32 x NB, shared memory).

    e4m3 by e4m3 in fp32, or u8 by s8 in int32; `first` is d = a times b.
    """
    lines = ["#pragma once", "template <bool INT8, int NB> struct Wgmma8;"]
    for int8, kind, c, tail in (("false", "f32.e4m3.e4m3", "float", ", 1, 1"), ("true", "s32.u8.s8", "int", "")):
        for nb in WGMMA8_COLUMNS:
            n, letter = nb // 2, c[0].replace("i", "r")
            d, a = ", ".join(f"%{i}" for i in range(n)), ", ".join(f"%{n + i}" for i in range(4))
            inputs = ", ".join([*(f'"r"(a[{i}])' for i in range(4)), '"l"(b)'])
            product = f"wgmma.mma_async.sync.aligned.m64n{nb}k32.{kind} {{{d}}}, {{{a}}}, %{n + 4}, "
            run = f"{{.reg .pred add; setp.ne.s32 add, %{n + 5}, 0; {product}add{tail};}}"
            arguments = f"{c} (&d)[{n}], const unsigned (&a)[4], unsigned long long b"
            lines.append(f"template <> struct Wgmma8<{int8}, {nb}> {{")
            for name, text, modifier, more, last in (
                ("run", run, "+", ", int add", ', "r"(add)'),
                ("first", f"{product}0{tail};", "=", "", ""),
            ):
                outputs = ", ".join(f'"{modifier}{letter}"(d[{i}])' for i in range(n))
                lines.append(
                    f"static __device__ __forceinline__ void {name}({arguments}{more}) "
                    f'{{ asm volatile("{text}" : {outputs} : {inputs}{last}); }}'
                )
            lines.append("};")
    return "\n".join(lines) + "\n"


def arch_of(capability: tuple[int, int]) -> str:
    """The NVRTC target for a GPU: sm_90a where Hopper's own instructions exist, else the plain capability."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


def cache_dir() -> Path | None:
    """Where cubins are kept; None for a user of no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowq" / "cubin"
    except RuntimeError:
        return None


def _key(file: str, expression: str, arch: str) -> str:
    h = hashlib.sha256(repr((version(), OPTIONS, arch, file, expression, sorted(sources().items()))).encode())
    return h.hexdigest()[:40]


def _read(path: Path) -> Cubin | None:
    """A cached cubin, or None where there is none or its checksum is off."""
    try:
        digest, blob = path.read_bytes().split(b"\n", 1)
        if hashlib.sha256(blob).hexdigest().encode() != digest:
            return None
        symbol, size, rest = blob.split(b"\n", 2)
        log, image = rest[: int(size)], rest[int(size) :]
        return Cubin(image, symbol.decode(), log.decode())
    except (OSError, ValueError):
        return None


def _write(path: Path, cubin: Cubin) -> None:
    log = cubin.log.encode()
    blob = b"%s\n%d\n%s%s" % (cubin.symbol.encode(), len(log), log, cubin.image)
    with suppress(OSError):  # a home that cannot be written to is no reason to fail
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(hashlib.sha256(blob).hexdigest().encode() + b"\n" + blob)
            os.replace(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)  # gone already where all went well


@cache
def compiled(file: str, expression: str, arch: str) -> Cubin:
    """The cubin of one instance, e.g. ("tile_mma.cu", "tile_mma<4, 0, 128, ...>", "sm_90a"), from the cache if it is there.

    Raises CompileError with the compiler's log where NVRTC refuses the source.
    """
    folder = cache_dir()
    path = folder / _key(file, expression, arch) if folder else None
    cubin = _read(path) if path else None
    if cubin is None:
        cubin = _compile(file, expression, arch)
        if path:
            _write(path, cubin)
    return cubin


def _compile(file: str, expression: str, arch: str) -> Cubin:
    headers = {k: v for k, v in sources().items() if k != file}
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
