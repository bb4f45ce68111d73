"""cuda/tile_int8x2: emulated on the CPU against the definition, compiled without spills, and run on a Hopper GPU."""

import dataclasses
import shutil

import pytest
import torch

import emulation
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers.scheme import Scheme

emulation.require("cuda/tile_int8x2", compiler=False)
from machine_code import without_spills

from lowq_kernels.products.cuda import int8_planes, tile_int8x2

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
SPEC = registry.kernels()["cuda/tile_int8x2"]


@dataclasses.dataclass(frozen=True)
class Case(emulation.Case):
    special: bool = False  # inf and nan in x


def operands(case, device="cpu"):
    """x, the packed weight, the bias, and the product by the definition."""
    x, p, bias, q = emulation.operands(case, device)
    if case.special:
        x[0, case.K - 1], x[1, 130], x[1, 131] = float("nan"), float("inf"), -3
    ref = x.float() @ q.dequantize().float().t().to(device) + (0 if bias is None else bias.float())
    return x, p, bias, ref


def check(case, y, ref):
    """Close to truth where that is finite, the same inf and nan elsewhere."""
    good = ref.isfinite()
    assert good.all() or case.special
    assert torch.equal(good, y.isfinite()), "inf or nan elsewhere"
    assert torch.equal(ref.isnan(), y.isnan())
    error = float((y.float() - ref)[good].norm() / ref[good].norm())
    assert error < TOLERANCE[case.dtype], f"error {error:.2e}"


HALF, BRAIN = TOLERANCE
CASES = [
    Case((7, 1, 4, 1), 2, HALF, 128, "float", 16, 300, 1024, bias=True),
    Case((2, 1, 4, 2), 1, HALF, 128, "float", 16, 330, 1152, sms=1),
    Case((1, 2, 4, 2), 1, BRAIN, 128, "none", 9, 200, 640, sms=1, bias=True),
    Case((2, 2, 2, 1), 2, BRAIN, 256, "int", 13, 136, 2304, sms=1),
    Case((1, 4, 2, 1), 2, HALF, 384, "float", 8, 193, 2304, sms=2, bias=True),
    Case((1, 2, 2, 2), 3, HALF, 128, "float", 11, 65, 1152, sms=1, special=True),
    Case((2, 1, 2, 2), 3, BRAIN, 1288, "float", 4, 264, 1288),  # a row is a group; K no multiple of 128
    Case((2, 1, 2, 2), 4, HALF, 128, "float", 16, 140, 1408, sms=1, special=True),
    Case((1, 2, 2, 2), 4, BRAIN, 640, "none", 3, 321, 640, bias=True),
    Case((1, 4, 2, 1), 1, HALF, 272, "int", 3, 72, 272, special=True),
    Case((7, 1, 2, 1), 2, HALF, 128, "none", 12, 900, 512, sms=1),
]


DEFECTS = {  # what stands in the source, and what is put there
    "registers overwritten under a product": ("products_wait<1>()", "products_wait<2>()"),
    "stage handed back early": ("barrier_init(empty + 8 * i, 4 * CONSUMERS)", "barrier_init(empty + 8 * i, 1)"),
    "inf lost": ("if (!(none == 0.f))", "if (false)"),
    "a warpgroup's sums left out": (
        "for (int k = 1; k < WARPGROUPS_K; k++) v[j]",
        "for (int k = 2; k < WARPGROUPS_K; k++) v[j]",
    ),
    "other span": ("span % 2 ? 0x7351 : 0x6240", "0x6240"),
}
NOTICED = {
    special: Case((2, 2, 2, 1), 1, HALF, 128, "float", 6, 264, 4096, sms=1, special=special) for special in (False, True)
}
CASES += NOTICED.values()  # right, and wrong with a defect


def launched(case):
    """A case's product twice, by threads in two orders, wgmma as early and as late as it may read: the same bits."""
    x, p, bias, ref = operands(case)
    config = dict(zip(tile_int8x2.KEYS, case.config, strict=True))
    call = dataclasses.replace(Call.of(x, p), device="cuda", capability=(9, 0))
    assert SPEC.why_not(call) is None, SPEC.why_not(call)
    assert config in SPEC.legal_configs(call)
    with emulation.sms(case.sms):
        return emulation.twice(lambda: SPEC.launch(x, p, bias, config)), ref


@pytest.fixture(scope="module")
def built():
    """The instances of all cases, those of one source by one run of g++, and those of its copies with a defect by another."""
    with emulation.hopper(tile_int8x2, int8_planes), emulation.built_at_once():
        for case in CASES:
            launched(case)
        for name in DEFECTS:
            with emulation.defect(tile_int8x2, "tile_int8x2.cu", *DEFECTS[name]):
                launched(NOTICED[name == "inf lost"])


@emulated
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case):
    """The definition's numbers."""
    with emulation.hopper(tile_int8x2, int8_planes):
        check(case, *launched(case))


@emulated
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", DEFECTS)
def test_the_emulator_notices(name):
    """Defects put into the source fail, as an error text or as a wrong number."""
    case = NOTICED[name == "inf lost"]
    with (
        emulation.hopper(tile_int8x2, int8_planes),
        emulation.defect(tile_int8x2, "tile_int8x2.cu", *DEFECTS[name]),
        pytest.raises(AssertionError),
    ):
        check(case, *launched(case))


@pytest.mark.parametrize("bits", [4, 3, 2, 1])
def test_compiles_without_spills(bits):
    for i, config in enumerate(tile_int8x2.CONFIGS):
        for M, group in ((16, 128), (8, (384, 0)[i % 2]))[bits % 2 :: 2] if i % 2 else ((12, 128), (16, 0)):
            if tile_int8x2.plan(M, bits, group, True, config)[0] < 2:
                continue
            expression = tile_int8x2.expression(M, bits, (bits + i) % 2, group, True, config)
            without_spills("tile_int8x2.cu", expression, "sm_90a")


@pytest.mark.parametrize(
    ("bits", "group", "M", "capability", "why"),
    [
        (2, 64, 16, (9, 0), "groups of 64"),
        (2, 192, 16, (9, 0), "groups of 192"),
        (8, 128, 16, (9, 0), "takes 4/3/2/1 bits"),
        (2, 128, 17, (9, 0), "takes M 1 .. 16"),
        (2, 128, 16, (10, 0), "needs wgmma (Hopper)"),
    ],
)
def test_refuses(bits, group, M, capability, why):
    call = Call(M, 256, 768, Scheme(bits, group, "float"), "tile", torch.float16, "cuda", capability)
    assert why in (SPEC.why_not(call) or "")


def gpu_cases(bits):
    """Every config: odd edges, groups of each kind, inf and nan; or more tiles than an SM takes at once."""
    for i, config in enumerate(tile_int8x2.CONFIGS):
        M, dtype, zero = (3, 16, 9, 5)[(i + bits) % 4], (HALF, BRAIN)[i % 2], ("none", "float", "int")[i % 3]
        yield Case(tuple(config.values()), bits, dtype, (128, 384, 1152)[i % 3], zero, M, 1000, 1152, bias=True, special=True)
        if i % 4 == bits % 4:
            yield Case(tuple(config.values()), bits, dtype, 128, "float", 16, 60040, 1024)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("bits", [4, 3, 2, 1])
def test_on_the_gpu(bits):
    for case in gpu_cases(bits):
        x, p, bias, ref = operands(case, "cuda")
        config = dict(zip(tile_int8x2.KEYS, case.config, strict=True))
        if config not in SPEC.legal_configs(Call.of(x, p)):  # too little shared memory: 4 bits, long steps
            continue
        y = SPEC.launch(x, p, bias, config)
        check(case, y, ref)
        assert torch.equal(y.nan_to_num(), SPEC.launch(x, p, bias, config).nan_to_num()), case
