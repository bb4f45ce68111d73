"""int8_planes.cu: x as 16-bit integers in two bytes, emulated on the CPU and on a GPU against what its page defines."""

import shutil

import pytest
import torch

import emulation
from lowq_packers.layouts.tile import CHUNK

emulation.require("cuda/tile_mma", compiler=False)
from lowq_kernels.products.cuda import int8_planes

CASES = [
    (4, 3, 4096, torch.float16),
    (3, 4, 2312, torch.bfloat16),
    (1, 16, 136, torch.float16),
    (4, 9, 200, torch.bfloat16),
    (2, 11, 2312, torch.float16),
    (1, 5, 1024, torch.bfloat16),
]


def rows(M, K, dtype):
    """Noise, a row of zeros, a huge and a tiny one, and one with an infinity and a NaN."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)
    x[1], x[2] = x[1] * 3e-5, 0
    x[0, ::9] = 1.9922 if dtype == torch.float16 else 1.984375  # the largest whose double two signed bytes hold, and beyond
    x[0, 4::27] = -1.999
    if M > 3:
        x[3, 7], x[3, K - 1] = float("inf"), float("nan")
    return x


def check(bits, x):
    """The bytes, put back in the order of k, are x to 2^-14 of each span's largest; units and sums are theirs."""
    M, K = x.shape
    planes, units = (t.cpu() for t in int8_planes.int8_planes(x, bits))
    units = units.reshape(len(units), 4, -1, 2).transpose(1, 2).reshape(units.shape)
    place = bits if bits < 3 else 0
    steps, chunk = -(-K // 128), CHUNK[bits] if CHUNK[bits] == 64 else 128
    j = torch.arange(128)
    i, h, quad, b = j // 32, j // 16 % 2, j // 4 % 4, j % 4
    f = i // 2 * 4 + i % 2 + b % 2 * 2 if chunk == 64 else i + b % 2 * 4
    k = 16 * f + 8 * h + 2 * quad + b // 2
    assert sorted(k.tolist()) == list(range(128))
    two = torch.empty(2 * M, steps, 128, dtype=torch.int32)
    two[:, :, k] = planes.view(torch.int8).int().reshape(2 * M, steps, 128) << (i % 2 * place).int()
    result = 256 * two[0::2] + two[1::2]
    padded = torch.nn.functional.pad(x.cpu().double(), (0, steps * 128 - K)).reshape(M, steps, 128)
    finite = padded.isfinite().all(-1)
    unit, total = units[:, :M, 0].t().double(), units[:, :M, 1].t()
    assert torch.equal(unit.isnan(), ~finite)
    assert torch.equal(total[finite], result.sum(-1).float()[finite])
    error = (result * unit[..., None] - padded).abs().amax(-1)[finite]
    assert (error <= padded.abs().amax(-1)[finite] * 1.01 * 2.0 ** -(14, 14, 13)[place]).all()
    assert (unit[finite] == 2.0 ** unit[finite].log2().round()).all()


@pytest.fixture(scope="module")
def built():
    """The instances of all cases by one run of g++."""
    with emulation.hopper(int8_planes), emulation.built_at_once():
        for bits, M, K, dtype in CASES:
            int8_planes.int8_planes(rows(M, K, dtype), bits)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("bits", "M", "K", "dtype"), CASES, ids=str)
def test_emulated(bits, M, K, dtype):
    with emulation.hopper(int8_planes):
        check(bits, rows(M, K, dtype))


@pytest.mark.parametrize("bits", [4, 3, 2, 1])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_compiles_without_spills(bits, arch):
    from machine_code import without_spills

    without_spills("int8_planes.cu", f"int8_planes<{bits % 2}, {bits}>", arch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("bits", "M", "K", "dtype"), CASES, ids=str)
def test_on_the_gpu(bits, M, K, dtype):
    check(bits, rows(M, K, dtype).cuda())
