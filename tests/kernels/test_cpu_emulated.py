"""Products of instruction sets that this CPU may not have, against the definition: every width, kind of zero and odd shape.

NEON needs g++-aarch64-linux-gnu and qemu-user; AVX-512's intrinsics are replaced (avx512_emulated.h):
any compiler for x86 will do.
"""

import platform
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from emulation import weight
from lowq_kernels.activations import int8_rows
from lowq_kernels.products.cpu import building, dense, native, packed, table
from lowq_packers.layouts import pack
from lowq_packers.scheme import BITS, ZERO_KINDS

HERE = Path(__file__).parent
CXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
SETS = {  # -> what must be installed; the compiler and its flags; sources; what runs the program
    # -Og: 4 s to compile instead of 33 at -O3, and it runs no longer; other flags as in a build
    "neon": ((CXX, QEMU), (*building.FLAGS, "-Og", *building.ARM["neon.cpp"], "-static"), ["neon.cpp"], (QEMU, "-cpu", "max")),
    "avx512": (
        ("g++",),
        # last flag of its kind: at -O1 the lanes' loops take 50 s
        (*building.FLAGS, "-O0", *building.X86["avx2.cpp"], "-Wno-psabi", "-include", str(HERE / "avx512_emulated.h")),
        ["avx512.cpp", "bf16.cpp"],
        (),
    ),
}
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 1e-6}
HALVES = (torch.float16, torch.bfloat16)
CASES = [(1, 33, 64, 32), (3, 40, 256, 128), (9, 17, 96, 96), (5, 31, 30, 30)]  # M N K group
TABLES = [(4, "e2m1/e4m3"), (4, "e2m1/e8m0"), (4, "nf4"), (3, "fitted"), (2, "fitted/e4m3")]
TABLES_OF = tuple(kind for _, kind in TABLES)
PARTS = ("x", "words", "scales", "zeros", "bias", "table", "factor")


@pytest.fixture(scope="module", params=SETS)
def program(request, tmp_path_factory):
    """The command that runs an instruction set's products."""
    tools, flags, sources, runner = SETS[request.param]
    if missing := [tool for tool in tools if not shutil.which(tool)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if request.param == "avx512" and building.units_here() is not building.X86:
        pytest.skip(f"AVX-512 is emulated on x86, this is {platform.machine()}")
    made = tmp_path_factory.mktemp(request.param) / "products"
    files = [*(building.HERE / name for name in sources), HERE / "cpu_main.cpp"]
    subprocess.run(
        [tools[0], *flags, f"-DMULTIPLY=product_{request.param}", f"-I{building.HERE}", *files, "-o", made], check=True
    )
    return [*runner, str(made)]


def blob(t):
    raw = b"" if t is None else t.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<q", len(raw)) + raw


def make(M, N, K, group, bits, zero, dtype):
    g = torch.Generator().manual_seed(N + K + bits)
    x, bias = torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype)
    return weight(N, K, bits, group, zero, dtype, g), x, bias


@pytest.mark.parametrize("bits", [16, *BITS, "tables"])
def test_products_against_the_definition(program, bits, monkeypatch):
    sent, truths = [], []
    kinds = {"tables": TABLES, 16: [(16, "dense")]}.get(bits) or [(bits, kind) for kind in (*ZERO_KINDS, "int8")]

    def send(tensors, meta, **numbers):
        kinds = {"dtype": native.DTYPES[tensors["y"].dtype], "meta": native.DTYPES[meta], "threads": 2}
        raw = bytes(native.Args(**numbers, **kinds))
        sent.append(struct.pack("<q", len(raw)) + raw + b"".join(blob(tensors.get(part)) for part in PARTS))

    monkeypatch.setattr(native, "product", send)
    for bits, zero in kinds:
        for dtype in TOLERANCE if zero == "dense" else HALVES:
            for M, N, K, group in CASES:
                if dtype == torch.float32 and M > dense.MOST_FP32:
                    continue
                q, x, bias = make(M, N, K, group, min(bits, 8), zero if zero in (*ZERO_KINDS, *TABLES_OF) else "float", dtype)
                W, taken = q.dequantize(), x.double()
                if zero == "dense":
                    W = W.to(dtype)
                    dense.product(x, W, bias)
                elif zero == "int8":
                    digits, scales = int8_rows(x)
                    taken = digits.double() * scales.double()
                    packed.packed_int8(x, pack(q, "cpu"), bias, {})
                else:
                    (packed.packed if zero in ZERO_KINDS else table.table)(x, pack(q, "cpu"), bias, {})
                truths.append((taken @ W.double().t() + bias.double(), dtype))
    done = subprocess.run(program, input=b"".join(sent), capture_output=True, check=True)
    at = 0
    for truth, dtype in truths:
        raw = bytearray(done.stdout[at : at + truth.numel() * dtype.itemsize])
        at += len(raw)
        y = torch.frombuffer(raw, dtype=dtype).reshape(truth.shape).double()
        assert (y - truth).norm() / truth.norm() < TOLERANCE[dtype]
    assert at == len(done.stdout)
