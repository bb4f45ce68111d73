"""Our CUDA kernels on a CPU: device sources compiled as host C++ against simt.h, launched by their own Python launchers.

`Kernel` stands in for `lowq_kernels.cuda.driver.Kernel`. The sources are read as they are; two things are rewritten
before g++ sees them, because it cannot: inline PTX becomes a call of the emulated instruction of that name with the
operands of that text, and `__shared__` declarations become references into the block's memory.
"""

import ctypes
import hashlib
import re
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import ClassVar

from lowq_kernels.cuda import driver, nvrtc

HERE = Path(__file__).parent
WGMMA = """template <int T, int NB> struct Wgmma {
    static void run(float (&d)[NB / 2], const unsigned (&a)[4], unsigned long long b) {
        simt::issue_wgmma({simt::wgmma<(T ? simt::bf16 : simt::f16), NB>, d, a, b, 1});
    }
    static void first(float (&d)[NB / 2], const unsigned (&a)[4], unsigned long long b) {
        simt::issue_wgmma({simt::wgmma<(T ? simt::bf16 : simt::f16), NB>, d, a, b, 0});
    }
};
"""
TURNED = WGMMA.replace("Wgmma {", "WgmmaTurned {").replace("simt::wgmma<", "simt::wgmma_turned<")
WGMMA8 = """template <bool INT8, int NB> struct Wgmma8 {
    template <class D> static void run(D (&d)[NB / 2], const unsigned (&a)[4], unsigned long long b, int add) {
        simt::issue_wgmma({simt::wgmma8<D, NB>, d, a, b, add});
    }
    template <class D> static void first(D (&d)[NB / 2], const unsigned (&a)[4], unsigned long long b) { run(d, a, b, 0); }
};
"""
WGMMA_FP8 = """template <int NB> struct WgmmaFp8 {
    static void run(float (&d)[NB / 2], unsigned long long a, unsigned long long b, int add) {
        simt::issue_wgmma({simt::wgmma8<float, NB, true>, d, (const unsigned*)a, b, add});
    }
};
"""
# of headers that nvrtc.py makes
GENERATED = {"wgmma.cuh": WGMMA, "wgmma_turned.cuh": TURNED, "wgmma8.cuh": WGMMA8, "wgmma_fp8.cuh": WGMMA_FP8}
FLAGS = ("-std=c++17", "-Og", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing")


def _closing(text: str, at: int) -> int:
    """Index of the bracket that closes the one at `at`; brackets in string literals do not count."""
    depth, quoted = 0, False
    for i in range(at, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            if depth == 0:
                return i
    raise ValueError(f"unbalanced brackets: {text[at : at + 80]!r}")


def _split(text: str, separator: str) -> list[str]:
    """text cut at separators that stand outside of brackets and string literals."""
    parts, depth, quoted, begin = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            if c == separator and depth == 0:
                parts.append(text[begin:i])
                begin = i + 1
    return [*parts, text[begin:]]


def _instruction(text: str, operands: list[str]) -> str:
    """One PTX instruction as C++."""
    opcode, _, rest = text.strip().partition(" ")
    if opcode == ".reg":
        return "simt::u16 " + rest.split(" ", 1)[1]
    arguments = [a.strip() for a in re.sub(r"[\[\]{}]", "", rest).split(",") if a.strip() not in ("", "_")]
    named = [operands[int(a[1:])] if a.startswith("%") else a for a in arguments]
    return f"simt::{re.sub(r'[.:]', '_', opcode)}({', '.join(named)})"


def _asm(body: str) -> str:
    """The inside of an asm statement as a C++ expression."""
    template, *sections = _split(body, ":")
    ptx = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', template))
    operands = []
    for section in sections[:2]:
        for operand in _split(section, ","):
            if operand.strip():
                operands.append(operand[operand.index("(") :].strip())
    if "mbarrier.try_wait" in ptx:  # a loop around it
        return f"simt::mbarrier_wait({operands[0]}, {operands[1]})"
    ptx = ptx.strip()
    ptx = ptx[1:-1] if ptx.startswith("{") else ptx
    lines = [_instruction(i, operands) for i in ptx.split(";") if i.strip()]
    return f"[&] {{ {'; '.join(lines)}; }}()" if lines else "(void)0"


def host_source(source: str) -> str:
    """A .cu or .cuh file as C++ over simt.h; line numbers stay."""
    out, at = [], 0
    for m in re.finditer(r"\basm\s*(?:volatile\s*)?\(", source):
        end = _closing(source, m.end() - 1)
        out += [source[at : m.start()], _asm(source[m.end() : end]), "\n" * source.count("\n", m.start(), end)]
        at = end + 1
    text = "".join([*out, source[at:]])
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];", r"\1* const \2 = (\1*)simt::dynamic_shared();", text
    )
    numbers = iter(range(1000))
    return re.sub(
        r"__shared__ (\w+) (\w+)((?:\[[^;]*\])+);",
        lambda m: f"using {m[2]}_type = {m[1]}{m[3]}; auto& {m[2]} = simt::variable<{m[2]}_type>({next(numbers)});",
        text,
    )


def tensor_map(
    address: int, element_bytes: int, inner: int, rows: int, row_bytes: int, box: tuple[int, int], swizzle: bool
) -> bytes:
    """Stands in for `driver.tensor_map`: what simt.h reads."""
    assert address % 16 == row_bytes % 16 == 0
    assert max(box) <= 256, "a box has at most 256 elements a side"
    width = inner * element_bytes
    return struct.pack(
        "8Q", address, width, rows, row_bytes, box[0] * element_bytes, box[1], swizzle, 0x51317 << 8 | element_bytes
    ) + bytes(64)


@cache
def build_folder() -> tempfile.TemporaryDirectory:
    """The sources as C++, and the libraries built from them, for this process."""
    folder = tempfile.TemporaryDirectory(prefix="lowq-simt-")
    for name, text in nvrtc.sources().items():
        (Path(folder.name) / name).write_text(GENERATED.get(name) or host_source(text))
    return folder


def build(keys: list[tuple[str, str]]) -> ctypes.CDLL:
    """A library with a function `run_<i>` for each (file, template instance); each file stands in a namespace of its own."""
    folder, files = Path(build_folder().name), list(dict.fromkeys(file for file, _ in keys))
    spaces = {file: f"file_{i}" for i, file in enumerate(files)}
    headers = dict.fromkeys(h for file in files for h in re.findall(r'#include "(\w+\.cuh)"', (folder / file).read_text()))
    lines = ['#include "simt.h"', *(f'#include "{h}"' for h in headers)]
    lines += [f'namespace {space} {{\n#include "{file}"\n}}' for file, space in spaces.items()]
    for i, (file, expression) in enumerate(keys):
        signature = (
            f'extern "C" const char* run_{i}(void* const* v, int x, int y, int threads, int smem, int cluster, int order)'
        )
        run = f"{spaces[file]}::call_{i}, v, x, y, threads, smem, cluster, order"
        lines.append(f"namespace {spaces[file]} {{ void call_{i}(void* const* v) {{ simt::call({expression}, v); }} }}")
        lines.append(f"{signature} {{ return simt::launch({run}); }}")
    unit = folder / (hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] + ".cpp")
    unit.write_text("\n".join(lines) + "\n")
    library = unit.with_suffix(".so")
    command = ["g++", *FLAGS, f"-I{HERE}", f"-I{folder}", str(unit), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ refuses {keys}:\n{done.stderr[:4000]}")
    return ctypes.CDLL(str(library))


class Kernel:
    """One template instance, launched like `driver.Kernel`; built at its first launch, or by `build_all` before."""

    made: ClassVar[dict[tuple[str, str], ctypes._CFuncPtr]] = {}
    wanted: ClassVar[dict[tuple[str, str], None]] = {}  # while `recording`, launches are noted here instead of run
    recording = False
    order = 1

    def __init__(self, file, expression, device, threads, parameters, smem=0, cluster=1, serialize=False, per_sm=32):
        self.file, self.expression, self.threads, self.parameters = file, expression, threads, driver.Parameters(parameters)
        self.limit, self.cluster, self.launches = max(smem, 48 << 10), cluster, 0

    def __call__(self, grid_x: int, grid_y: int, smem: int, *values: object) -> None:
        key, self.launches = (self.file, self.expression), self.launches + 1
        if Kernel.recording:
            Kernel.wanted[key] = None
            return
        if key not in Kernel.made:
            build_all([key])
        assert smem <= self.limit, f"{smem} bytes of shared memory, {self.limit} are allowed"
        self.parameters.fill(*values)
        error = Kernel.made[key](self.parameters.addresses, grid_x, grid_y, self.threads, smem, self.cluster, Kernel.order)
        assert error is None, f"{self.expression}: {error.decode()}"


def build_all(keys: list[tuple[str, str]]) -> None:
    """Build instances, those of one file in one go, and those of all copies of a file with a defect."""
    missing = [key for key in dict.fromkeys(keys) if key not in Kernel.made]
    for origin in {file.rpartition("-")[2] for file, _ in missing}:
        for copies in (False, True):
            group = [key for key in missing if key[0].rpartition("-")[2] == origin and (key[0] != origin) == copies]
            library = build(group) if group else None
            for i, key in enumerate(group):
                run = library[f"run_{i}"]
                run.restype = ctypes.c_char_p
                Kernel.made[key] = run
