"""tile_mma's INT8_PLANES (split_int8.cuh) emulated on a CPU: codes as bytes against fp64 truth, and what no span of x fits."""

import dataclasses
from functools import partial

import pytest
import torch

import emulation
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

emulation.require("cuda/tile_mma")
from lowq_kernels.products.cuda import tile_mma

F16, BF16 = torch.float16, torch.bfloat16
WIDTHS = (4, 3, 2, 1, "nf4")  # or a table of 4 bits
CASES = [  # bits, dtype, group (0: a row is one), zero, M, N, K, config
    (2, F16, 128, "float", 1, 72, 2304, (8, 2, 256, 2, 1)),
    (2, F16, 128, "float", 1, 72, 4608, (4, 2, 512, 1, 1)),
    (2, BF16, 128, "none", 2, 33, 1152, (8, 2, 512, 1, 1)),
    (2, F16, 64, "int", 1, 17, 640, (4, 4, 512, 1, 1)),
    (2, F16, 0, "float", 2, 33, 104, (4, 2, 256, 1, 1)),
    (2, BF16, 192, "float", 2, 40, 1152, (4, 1, 512, 1, 1)),
    (1, F16, 128, "float", 1, 72, 2304, (8, 1, 512, 1, 1)),
    (1, F16, 64, "none", 1, 33, 1152, (4, 2, 256, 2, 1)),
    (1, BF16, 0, "float", 1, 17, 208, (4, 2, 512, 1, 1)),
    (1, F16, 256, "int", 2, 100, 1280, (4, 2, 512, 1, 1)),
    (3, F16, 128, "float", 1, 72, 2304, (4, 2, 512, 1, 1)),
    (3, BF16, 64, "int", 2, 33, 1152, (8, 1, 256, 1, 1)),
    (4, F16, 128, "float", 1, 72, 2304, (4, 2, 512, 1, 1)),
    (4, BF16, 64, "none", 2, 33, 1152, (8, 2, 256, 1, 1)),
    (4, F16, 32, "float", 1, 72, 2304, (4, 2, 512, 1, 1)),
    (4, F16, 96, "int", 1, 33, 1152, (8, 1, 256, 1, 1)),
    (4, BF16, 32, "float", 2, 33, 1152, (8, 2, 256, 1, 1)),
    (3, BF16, 32, "float", 1, 33, 1152, (8, 1, 256, 1, 1)),
    (2, F16, 32, "float", 1, 40, 1152, (4, 2, 512, 1, 1)),
    (4, F16, 64, "float", 1, 72, 4608, (4, 4, 256, 2, 1)),
    (4, F16, 128, "float", 2, 72, 4608, (8, 2, 256, 2, 1)),
    (3, F16, 128, "float", 1, 72, 4608, (4, 2, 256, 2, 1)),
    (1, BF16, 128, "float", 1, 72, 10240, (8, 2, 512, 2, 1)),
    (4, F16, 128, "float", 1, 8512, 2304, (2, 2, 512, 2, 1)),  # more than 264 blocks
    *((4, *case) for case in (
        (BF16, 32, "nf4/e8m0", 1, 40, 416, (8, 1, 256, 1, 1)), (F16, 128, "nf4", 1, 40, 640, (4, 1, 256, 1, 1)),
        (F16, 64, "nf4", 1, 72, 2304, (8, 2, 256, 2, 1)), (F16, 32, "fitted/e4m3", 1, 96, 1152, (4, 2, 512, 1, 1)),
        (BF16, 64, "nf4", 2, 33, 1152, (4, 2, 512, 1, 1)), (F16, 32, "iq4_nl", 2, 40, 1152, (4, 1, 256, 1, 1)),
        (F16, 96, "fitted", 1, 96, 1152, (4, 2, 256, 1, 1)),
        (F16, 0, "fitted/e8m0", 1, 96, 104, (4, 2, 256, 1, 1)),
    )),
]  # fmt: skip


BYTES = ("nf4/e4m3", "nf4/e8m0")
NAN_STAYS = ("if (!(v * 0.f == 0.f))", "if (false)")
DEFECTS = {  # what stands in the source, and what is put there
    "x is not waited for": ("copy_wait<0>();\n        __syncwarp();\n        planes.store();", "planes.store();"),
    "nor are planes": ("planes.store();\n        __syncwarp();", "planes.store();"),
    "low planes off by 128": ("__byte_perm(even, odd, 0x5410) ^ 0x80808080u", "__byte_perm(even, odd, 0x5410)"),
    "spans share columns": ("(row * EACH + span % EACH) * 64", "row * EACH * 64"),
    "nan stays": NAN_STAYS,
}


def planted(name):
    return emulation.defect(tile_mma, "tile_mma.cu", *DEFECTS[name], NAN_STAYS)


@pytest.fixture(autouse=True, scope="module")
def gpu(request):
    """Launchers see a GPU of capability 9.0 behind CPU tensors; all cases are compiled first, together."""
    with emulation.hopper(tile_mma):
        with emulation.built_at_once():
            for case in [*emulation.selected(request, "case"), *map(special, (*WIDTHS, *BYTES))]:
                product(case, torch.zeros(case[4], case[6], dtype=case[1]))
            for name in DEFECTS:
                case = special(2) if name == "nan stays" else CASES[1]
                with planted(name):
                    product(case, torch.zeros(case[4], case[6], dtype=case[1]))
        yield


def special(width):
    bits, zero = (4, width) if isinstance(width, str) else (width, "float")
    return (bits, BF16 if width in (1, 3, "nf4") else F16, 128, zero, 1, 33, 768, (8, 2, 256, 2, 1))


def weight(case):
    bits, dtype, group, zero, _, N, K, _ = case
    return emulation.weight(N, K, bits, group, zero, dtype, tables=3 if zero.split("/")[0] == "fitted" else 1)


def product(case, x):
    """(y, x W^T in fp64) by the config of a case; the same bits with the threads in the other order."""
    q = weight(case)
    p = pack(q, "tile")
    config = tile_mma.config_of(*case[7], 1)
    call = dataclasses.replace(Call.of(x, p), device="cuda")
    assert registry.named("cuda/tile_mma").config_refuse(call, config) is None
    return emulation.twice(lambda: tile_mma.tile_mma(x, p, None, config)), x.double() @ q.dequantize().double().t()


@pytest.mark.parametrize("case", emulation.sampled(CASES), ids=lambda c: f"b{c[0]}-g{c[2]}-{c[3]}-{c[4]}x{c[5]}x{c[6]}")
def test_right_numbers(case):
    """No further off than rounding y alone makes it, by 5%; by 20% where a table's values are rounded to 14 bits."""
    y, ref = product(case, torch.randn(case[4], case[6], generator=torch.Generator().manual_seed(1)).to(case[1]))
    more = 1.2 if Scheme.of(case[0], 32, case[3]).table else 1.05
    assert (y.double() - ref).norm() < more * (ref.to(case[1]).double() - ref).norm()


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_every_size(width):
    """x within 2^-14 of the largest |x| of each span of 128, times the largest code, and the rounding of y."""
    case = special(width)
    dtype = case[1]
    g = torch.Generator().manual_seed(2)
    normal = torch.randn(1, 768, generator=g)
    largest, least = (65504.0, 2**-24) if dtype == F16 else (1e37, 2**-120)
    one = normal.clone()
    one[0, 5] = largest
    xs = (
        normal.sign() * largest,
        one,
        normal * least * 5,
        normal * torch.exp(2 * torch.randn(1, 768, generator=g)),
        normal * 0,
    )
    q = weight(case)
    for x in (v.to(dtype) for v in xs):
        y, ref = product(case, x)
        off = (x.double().abs().reshape(6, 128).amax(1) * 2**-14).clamp(min=2**-126)  # of an x, the least unit's half
        step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # of the smallest y
        allowed = 2 ** case[0] * (q.scales.double() @ off) * 128**0.5 + ref.abs() * torch.finfo(dtype).eps + step
        assert (((y.double() - ref).abs() <= allowed) | (y == ref.to(dtype))).all()  # infinity too


@pytest.mark.parametrize("width", [*WIDTHS, *BYTES])
def test_no_finite_numbers(width):
    """Infinities, nan and sums past the largest number come out as the reference has them."""
    case = special(width)
    dtype = case[1]
    for values in ((float("inf"),), (-float("inf"),), (float("nan"),), (float("inf"), -float("inf"))):
        x = torch.randn(1, 768, generator=torch.Generator().manual_seed(3)).to(dtype)
        x[0, 700 : 700 + len(values)] = torch.tensor(values, dtype=dtype)
        y, ref = product(case, x)
        assert torch.equal(y.nan_to_num(7.0, 8.0, -8.0), ref.to(dtype).nan_to_num(7.0, 8.0, -8.0))
    y, ref = product(case, torch.full((1, 768), torch.finfo(dtype).max, dtype=dtype))
    if dtype == F16:  # bf16: fp32 sums of such x are past their end before the last
        assert torch.equal(y.isinf(), ref.to(dtype).isinf())
    assert not y.isnan().any()


def test_one_flipped_code_shows():
    """The tests above can fail: one wrong code of 55,296 is past their limit."""
    case = CASES[0]
    x = torch.randn(1, case[6], generator=torch.Generator().manual_seed(1)).to(F16)
    y, ref = product(case, x)
    q = weight(case)
    q.W_q[3, 5] ^= 1
    wrong = x.double() @ q.dequantize().double().t()
    assert (y.double() - wrong).norm() > 1.05 * (ref.to(F16).double() - ref).norm()


@pytest.mark.parametrize("name", DEFECTS)
def test_the_emulator_notices(name):
    """Defects put into the source fail, as an error text or as a wrong number. (A nan that is made again hides some.)"""
    fails = partial(test_no_finite_numbers, 2) if name == "nan stays" else partial(test_right_numbers, CASES[1])
    with planted(name), pytest.raises(AssertionError):
        fails()


@pytest.mark.parametrize(
    ("bits", "group", "M", "why"),
    [
        (8, 128, 1, "planes are for up to 4 bits"),
        (4, 16, 1, "planes take whole groups of 32"),
        ("nf4/e4m3", 16, 1, "planes take whole groups of 32"),
        ("e2m1/e8m0", 32, 1, "FP4 is slower as bytes than as halves"),
        (4, 128, 3, "planes are for up to 2 rows"),
        (1, 64, 2, "a chunk has more spans than B columns for them"),
    ],
)
def test_unsupported_calls_are_refused(bits, group, M, why):
    scheme = Scheme.of(4, group, bits) if isinstance(bits, str) else Scheme(bits, group, "float")
    call = Call(M, 4096, 4096, scheme, "tile", F16, "cuda", (9, 0))
    assert registry.named("cuda/tile_mma").config_refuse(call, tile_mma.config_of(8, 2, 256, 1, 1, 1)) == why
