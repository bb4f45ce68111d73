"""8-bit activations over the tile layout: emulated on the CPU against the definition, compiled, and run on a Hopper GPU."""

import dataclasses
import shutil

import pytest
import torch

import emulation
from lowq_kernels import activations
from lowq_kernels.decode import activation, reference
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

emulation.require("cuda/tile_int8", compiler=False)
from machine_code import without_spills

from lowq_kernels.decode.gate_product import gate_product, norm_product
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cuda import act_rows, tile_wgmma8

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@dataclasses.dataclass(frozen=True)
class Case(emulation.Case):
    act: str = ""

    def __str__(self):
        return f"{self.act}-{super().__str__()}"


def operands(case, device="cpu"):
    """x, the packed weight, the bias, and the product by the definition."""
    x, p, bias, q = emulation.operands(case, device)
    rounded = activations.rounded(x.float(), case.act)
    ref = rounded @ q.dequantize().t().to(device) + (0 if bias is None else bias.float())
    return x, p, bias, ref


CASES = [
    Case((2, 128, 1), 4, torch.float16, 128, "float", 130, 300, 512, sms=1, act="fp8"),
    Case((2, 128, 1), 4, torch.float16, 64, "float", 33, 200, 320, sms=2, bias=True, act="int8"),
    Case((2, 64, 1), 4, torch.bfloat16, 64, "none", 70, 136, 192, act="fp8"),
    Case((2, 64, 2), 8, torch.bfloat16, 128, "float", 40, 264, 1152, act="int8"),
    Case((2, 64, 2), 2, torch.float16, 128, "float", 40, 136, 1152, act="fp8"),  # sums that begin at no multiple of 16 bytes
    Case((1, 64, 1), 8, torch.float16, 64, "none", 65, 65, 1024, sms=1, bias=True, act="int8"),
    Case((2, 64, 2), 2, torch.float16, 128, "float", 100, 320, 1024, bias=True, act="fp8"),
    Case((1, 128, 1), 2, torch.bfloat16, 272, "float", 34, 136, 272, act="int8"),
    Case((1, 64, 4), 3, torch.float16, 256, "float", 64, 130, 1280, bias=True, act="fp8"),
    Case((1, 64, 4), 4, torch.float16, 128, "float", 64, 136, 1152, act="int8"),  # the fourth block has no share of K
    Case((2, 128, 1), 4, torch.bfloat16, 64, "float", 140, 520, 2176, sms=2, act="fp8"),  # several steps of sums a tile
    Case((1, 128, 2), 3, torch.float16, 128, "none", 35, 190, 384, act="int8"),
    Case((1, 64, 2), 4, torch.float16, 8320, "float", 33, 65, 8320, act="fp8"),  # a row is a group; more sums than a step takes
    Case((2, 128, 1), 4, torch.bfloat16, 32, "e2m1/e8m0", 130, 300, 480, sms=1, bias=True, act="fp8"),
    Case((1, 128, 2), 4, torch.float16, 32, "e2m1/e8m0", 64, 136, 1120, act="fp8"),
]


@pytest.fixture(scope="module")
def built():
    """The instances of all cases, those of one source by one run of g++."""
    with emulation.hopper(tile_wgmma8), emulation.built_at_once():
        for case in CASES:
            x, p, bias, _ = operands(case)
            config = dict(zip(tile_wgmma8.KEYS, case.config, strict=True))
            with emulation.sms(case.sms):
                registry.kernels()[f"cuda/tile_{case.act}"].launch(x, p, bias, config)


@emulated
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case):
    """Twice, threads in two orders, wgmma as early and as late as it may read: the same bits, the definition's numbers."""
    x, p, bias, ref = operands(case)
    spec, config = registry.kernels()[f"cuda/tile_{case.act}"], dict(zip(tile_wgmma8.KEYS, case.config, strict=True))
    call = dataclasses.replace(Call.of(x, p, case.act), device="cuda", capability=(9, 0))
    assert spec.why_not(call) is None, spec.why_not(call)
    assert config in spec.legal_configs(call)
    with emulation.hopper(tile_wgmma8), emulation.sms(case.sms):
        y = emulation.twice(lambda: spec.launch(x, p, bias, config))
    assert emulation.error(y, ref) < TOLERANCE[case.dtype]


def powers(case, device="cpu"):
    """x and a weight of MXFP4 whose groups have powers from 2^-127 to 2^-60; the product where those 2^12 times smaller than
    the largest of their 128 k count as 0, and the one where they do not."""
    x, p, _, q = emulation.operands(case, "cpu")
    g = torch.Generator().manual_seed(case.K)
    bytes_ = 40 + torch.randint(0, 13, q.scales.shape, generator=g).to(torch.uint8)
    bytes_[::3] = torch.randint(0, 68, bytes_[::3].shape, generator=g).to(torch.uint8)  # of a third of the rows any, 0 included
    q = dataclasses.replace(q, scales=bytes_)
    most = bytes_.int().unfold(1, 4, 4).amax(-1).repeat_interleave(4, 1)
    dropped = (most - bytes_.int() >= 12).repeat_interleave(32, 1)
    W = q.dequantize().double()
    x8 = activations.rounded(x.float(), "fp8").double()
    p = dataclasses.replace(pack(q, "tile"))
    p = dataclasses.replace(p, words=p.words.to(device), scales=p.scales.to(device))
    return x.to(device), p, (x8 @ W.masked_fill(dropped, 0).T).to(device), (x8 @ W.T).to(device)


POWERS = Case((2, 64, 1), 4, torch.bfloat16, 32, "e2m1/e8m0", 40, 130, 512, act="fp8")


def by_row(y, wanted):
    """The largest relative error of a row of W."""
    return ((y.double() - wanted).norm(dim=0) / wanted.norm(dim=0)).max()


@emulated
def test_powers_emulated():
    x, p, wanted, exact = powers(POWERS)
    config = dict(zip(tile_wgmma8.KEYS, POWERS.config, strict=True))
    with emulation.hopper(tile_wgmma8), emulation.sms(2):
        y = emulation.twice(lambda: tile_wgmma8.tile_fp8(x, p, None, config))
    assert by_row(y, wanted) < 1e-2
    assert 0 < by_row(wanted, exact) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_powers_on_the_gpu():
    for config in tile_wgmma8.CONFIGS:
        x, p, wanted, _ = powers(dataclasses.replace(POWERS, M=300, N=1000, K=2944), "cuda")
        assert by_row(tile_wgmma8.tile_fp8(x, p, None, config), wanted) < 1e-2


GATED = [  # K of two rounds of act_rows; K that is no multiple of 128, and of 8
    ("silu", Case((1, 64, 1), 4, torch.float16, 128, "float", 5, 72, 4224, act="fp8")),
    ("gelu_tanh", Case((1, 64, 1), 8, torch.bfloat16, 272, "none", 35, 130, 272, bias=True, act="int8")),
    ("clamped_swiglu", Case((1, 64, 1), 4, torch.float16, 32, "e2m1/e8m0", 33, 72, 288, act="fp8")),
]


def gated_operands(gate, case, device="cpu"):
    """Gate and up, the packed weight, the bias, and the product of the rounded act(gate) * up."""
    x, p, bias, q = emulation.operands(case, device)
    gate_up = torch.cat([x, x.flip(0)], 1) / x.abs().amax(1, keepdim=True)
    x = activation.gated(gate_up, gate)
    ref = activations.rounded(x.float(), case.act) @ q.dequantize().t().to(device) + (0 if bias is None else bias.float())
    return gate_up, p, bias, ref


@emulated
@pytest.mark.parametrize(("gate", "case"), GATED, ids=str)
def test_gated_emulated(gate, case):
    """act(gate) * up is computed by the launch that rounds it."""
    gate_up, p, bias, ref = gated_operands(gate, case)
    config = dict(zip(tile_wgmma8.KEYS, case.config, strict=True))
    with emulation.hopper(tile_wgmma8), emulation.sms(case.sms):
        y = emulation.twice(lambda: tile_wgmma8.product(gate_up, p, bias, config, case.act == "int8", gate))
    assert emulation.error(y, ref) < 2 * TOLERANCE[case.dtype]


def normed_operands(case, adds, device="cpu"):
    """A stream, what is added to it (or None), the norm's weight, the packed weight, its bias; stream and product."""
    x, p, bias, q = emulation.operands(case, device)
    delta, weight = x.flip(0) / 3 if adds else None, torch.rand(x.shape[1], device=device).to(x.dtype)
    added = x if delta is None else x + delta
    y = reference.add_norm(x.clone(), delta, weight, 1e-5)
    ref = activations.rounded(y.float(), case.act) @ q.dequantize().t().to(device) + (0 if bias is None else bias.float())
    return x, delta, weight, p, bias, added, ref


@emulated
@pytest.mark.parametrize(("gate", "case"), GATED, ids=str)
def test_normed_emulated(gate, case):
    """The launch that rounds also adds to the stream and norms it."""
    x, delta, weight, p, bias, added, ref = normed_operands(case, gate == "silu")
    config = dict(zip(tile_wgmma8.KEYS, case.config, strict=True))

    def product():
        stream = x.clone()
        found = tile_wgmma8.normed(stream, delta, weight, 1e-5, p, case.act == "int8")
        assert torch.equal(stream, added)
        return tile_wgmma8.multiply(found, p, bias, config, p.N)

    with emulation.hopper(tile_wgmma8), emulation.sms(case.sms):
        y = emulation.twice(product)
    assert emulation.error(y, ref) < 2 * TOLERANCE[case.dtype]


def rows_to_round(K, dtype, device="cpu"):
    """Rows of noise, zeros, tiny and huge values, and one that holds an infinity and a NaN."""
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(K)).to(dtype)
    x[1], x[2] = 0, x[2] * 1e-6
    x[3, 7], x[4, K - 1], x[4, 0] = 6e4, float("nan"), float("inf")
    return x.to(device)


ROUNDED = [
    (14336, torch.float16, "int8"),
    (14336, torch.float16, "fp8"),
    (2053, torch.bfloat16, "int8"),
    (2053, torch.bfloat16, "fp8"),
]


@pytest.fixture(scope="module")
def rounding():
    """Builds all instances of the kernel that rounds, in one go."""
    with emulation.hopper(act_rows), emulation.built_at_once():
        for K, dtype, act in ROUNDED:
            act_rows.rounded_rows(rows_to_round(K, dtype), act)


@emulated
@pytest.mark.parametrize(("K", "dtype", "act"), ROUNDED, ids=str)
@pytest.mark.usefixtures("rounding")
def test_rounding_emulated(K, dtype, act):
    x = rows_to_round(K, dtype)
    with emulation.hopper(act_rows):
        y = act_rows.rounded_rows(x, act)
    assert torch.equal(y.isnan(), activations.rounded(x, act).isnan())
    assert torch.equal(y.nan_to_num(), activations.rounded(x, act).nan_to_num())


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["int8", "fp8"])
@pytest.mark.parametrize(("K", "dtype"), [(14336, torch.float16), (2053, torch.bfloat16), (8, torch.float16)], ids=str)
def test_rounding_on_the_gpu(act, K, dtype):
    x = rows_to_round(K, dtype)
    y = activations.rounded(x.cuda(), act).cpu()
    assert torch.equal(y.isnan(), activations.rounded(x, act).isnan())
    assert torch.equal(y.nan_to_num(), activations.rounded(x, act).nan_to_num())


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("int8", [True, False], ids=("int8", "fp8"))
def test_compiles_without_spills(bits, int8):
    if bits == 8 and not int8:
        pytest.skip("e4m3 has no codes of 8 bits")
    for i, group in ((0, 128), (3, 64 if bits in (4, 8) else 0)):
        expression = tile_wgmma8.expression(bits, i % 2, int8, group, i == 0, tile_wgmma8.CONFIGS[i])
        without_spills("tile_wgmma8.cu", expression, "sm_90a")


@pytest.mark.parametrize("i", [0, 4, 8])
def test_mxfp4_compiles_without_spills(i):
    expression = tile_wgmma8.expression(4, i // 4 % 2, False, tile_wgmma8.MX, False, tile_wgmma8.CONFIGS[i], i == 4)
    without_spills("tile_wgmma8.cu", expression, "sm_90a")


@pytest.mark.parametrize(
    ("act", "bits", "group", "why"),
    [
        ("fp8", 4, 32, "groups of 32"),
        ("int8", 2, 64, "groups of 64"),
        ("int8", 4, 192, "groups of 192"),
        ("fp8", 8, 128, "takes 4/3/2 bits"),
        ("int8", 4, "e2m1/e8m0", "takes evenly spaced values"),
        ("fp8", 4, "e2m1/e4m3", "takes MXFP4's"),
    ],
)
def test_refuses(act, bits, group, why):
    scheme = Scheme(bits, group, "float") if isinstance(group, int) else Scheme.of(bits, 32, group)
    call = Call(64, 256, 384 * 2, scheme, "tile", torch.float16, "cuda", (9, 0), act)
    assert why in (registry.kernels()[f"cuda/tile_{act}"].why_not(call) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["int8", "fp8"])
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_on_the_gpu(act, bits):
    """Every config, odd edges, both types; the same bits twice."""
    if bits == 8 and act == "fp8":
        pytest.skip("e4m3 has no codes of 8 bits")
    spec, groups = registry.kernels()[f"cuda/tile_{act}"], (64, 128, 768) if bits in (8, 4) else (128, 768)
    for i, config in enumerate(tile_wgmma8.CONFIGS):
        for M, N, group, zero in (
            (33, 200, 128, "float"),
            (300, 1000, groups[i % len(groups)], ("none", "float")[i % 2]),
            (1027, 4104, 128, "float"),
            *((M, N, 32, "e2m1/e8m0") for M, N in ((300, 1000), (97, 2888)) if (act, bits) == ("fp8", 4)),
        ):
            K, dtype = 768 if group == 768 else 1152, tuple(TOLERANCE)[(i + M) % 2]
            case = Case(i, bits, dtype, group, zero, M, N, K, bias=M == 300, act=act)
            x, p, bias, ref = operands(case, "cuda")
            assert spec.why_not(Call.of(x, p, act)) is None
            y = spec.launch(x, p, bias, config)
            assert emulation.error(y, ref) < TOLERANCE[case.dtype], case
            assert torch.equal(y, spec.launch(x, p, bias, config)), case


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["int8", "fp8"])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_gated_on_the_gpu(act, gate):
    """As a layer behind a gate computes it; of few rows, which are not rounded, nothing is taken."""
    case = Case(0, 4, torch.bfloat16, 128, "float", 300, 1000, 14336, bias=True, act=act)
    gate_up, p, bias, ref = gated_operands(gate, case, "cuda")
    layer = QuantLinear.from_packed(p, bias)
    layer.set_act(act)
    assert emulation.error(gate_product(layer, gate_up, gate), ref) < 2 * TOLERANCE[case.dtype]
    assert gate_product(layer, gate_up[: activations.STEPS], gate) is None


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["int8", "fp8"])
@pytest.mark.parametrize("adds", [True, False])
def test_normed_on_the_gpu(act, adds):
    """As a layer behind a norm computes it, and the stream with what is added; of few rows nothing is taken or changed."""
    case = Case(0, 4, torch.bfloat16, 128, "float", 2100, 1000, 4096, bias=True, act=act)
    x, delta, weight, p, bias, added, ref = normed_operands(case, adds, "cuda")
    layer = QuantLinear.from_packed(p, bias)
    layer.set_act(act)
    stream, few = x.clone(), x[:2047].clone()
    assert emulation.error(norm_product(layer, stream, delta, weight, 1e-5), ref) < 2 * TOLERANCE[case.dtype]
    assert torch.equal(stream, added)
    assert norm_product(layer, few, None, weight, 1e-5) is None
    assert torch.equal(few, x[:2047])
