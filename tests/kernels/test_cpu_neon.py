"""The NEON products under an emulator, against the definition: every width, kind of zero and odd shape.

Needs g++-aarch64-linux-gnu and qemu-user: the one way to run them on an x86 machine.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from emulation import weight
from lowq_kernels.products.cpu import building, native, packed, table
from lowq_packers.layouts import pack
from lowq_packers.scheme import BITS, ZERO_KINDS

CXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (CXX, QEMU) if not shutil.which(tool)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
CASES = [(1, 33, 64, 32), (3, 40, 384, 128), (9, 17, 96, 96), (5, 31, 30, 30)]  # M N K group
TABLES = [(4, "e2m1/e4m3"), (4, "e2m1/e8m0"), (4, "nf4"), (3, "fitted"), (2, "fitted/e4m3")]
PARTS = ("x", "words", "scales", "zeros", "bias", "most", "table", "factor")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    made = tmp_path_factory.mktemp("neon") / "products"
    sources = [building.HERE / "neon.cpp", Path(__file__).with_name("neon_main.cpp")]
    command = [
        CXX,
        *building.FLAGS,
        *building.ARM["neon.cpp"],
        f"-I{building.HERE}",
        "-static",
        *map(str, sources),
        "-o",
        str(made),
    ]
    subprocess.run(command, check=True)
    return made


def blob(t):
    raw = b"" if t is None else t.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<q", len(raw)) + raw


def make(M, N, K, group, bits, zero, dtype):
    g = torch.Generator().manual_seed(N + K + bits)
    x, bias = torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype)
    return weight(N, K, bits, group, zero, dtype, g), x, bias


@pytest.mark.parametrize("bits", [*BITS, "tables"])
def test_products_against_the_definition(program, bits, monkeypatch):
    sent, truths, kinds = [], [], TABLES if bits == "tables" else [(bits, zero) for zero in ZERO_KINDS]

    def send(tensors, meta, **numbers):
        kinds = {"dtype": native.DTYPES[tensors["y"].dtype], "meta": native.DTYPES[meta], "threads": 2}
        raw = bytes(native.Args(**numbers, **kinds))
        sent.append(struct.pack("<q", len(raw)) + raw + b"".join(blob(tensors.get(part)) for part in PARTS))

    monkeypatch.setattr(native, "product", send)
    for bits, zero in kinds:
        for dtype in TOLERANCE:
            for M, N, K, group in CASES:
                q, x, bias = make(M, N, K, group, bits, zero, dtype)
                (packed.packed if zero in ZERO_KINDS else table.table)(x, pack(q, "cpu"), bias, {})
                truths.append((x.double() @ q.dequantize().double().t() + bias.double(), dtype))
    done = subprocess.run([QEMU, "-cpu", "max", str(program)], input=b"".join(sent), capture_output=True, check=True)
    at = 0
    for truth, dtype in truths:
        raw = bytearray(done.stdout[at : at + truth.numel() * 2])
        at += len(raw)
        y = torch.frombuffer(raw, dtype=dtype).reshape(truth.shape).double()
        assert (y - truth).norm() / truth.norm() < TOLERANCE[dtype]
    assert at == len(done.stdout)
