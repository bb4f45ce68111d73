"""fp8 blocks: quantizer and products against lowq_packers.fp8, the definition; interpreted here, on the hardware with a GPU."""

import itertools
import re
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import numpy as np

import emulation
from emulation import error
from lowq_kernels import activations
from lowq_kernels.dispatch.registry import kernels, named, select
from lowq_kernels.fp8 import block_quant, gemm_triton, matmul
from lowq_kernels.fp8.call import Fp8Call
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers import fp8
from lowq_packers.errors import SchemeError, UnsupportedError
from lowq_packers.fp8 import Fp8Matrix
from lowq_packers.layouts import PackedWeight
from lowq_packers.scheme import Scheme

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BLOCKS = [(256, 256), (128, 128), (1, 128)]
PLANS = [{"PLAN": "tile", "num_warps": 4}, block_quant.STRIDE_PLANS[0], {"PLAN": "spread", "PARTS": 1, "num_warps": 4}]
if GPU:  # programs that wait for each other would wait forever where they run one after the other
    PLANS += [*block_quant.TILE_PLANS[1:], *block_quant.STRIDE_PLANS[1:], *block_quant.SPREAD_PLANS]
TOLERANCE = 5e-3  # relative; bf16 outputs 1.7e-3, and the tensor core's own sums


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """torch.empty gives NaN. Triton's interpreter loses the carry when it rounds to fp8: torch rounds for it."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not GPU:
        from triton.runtime import interpreter

        theirs = interpreter._convert_float

        def convert(x, source, target, mode):
            if (str(source), str(target)) != ("fp32", "fp8e4nv"):
                return theirs(x, source, target, mode)
            return torch.from_numpy(np.array(x, dtype=np.float32)).to(fp8.FP8).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", convert)
    yield
    torch.use_deterministic_algorithms(False)


def same_bits(a: Fp8Matrix, b: Fp8Matrix) -> bool:
    return torch.equal(a.q.view(torch.uint8), b.q.view(torch.uint8)) and torch.equal(a.scales, b.scales)


# ---- the definition ----


def test_definition_by_hand():
    """Maximum 896 -> scale 2: 896, 3 and 0.001 become 448, 1.5 and the nearest subnormal; another block has its own scale."""
    x = torch.zeros(2, 256)
    x[0, :3] = torch.tensor([896.0, -3.0, 0.001])
    x[1, 255] = 7.0
    m = fp8.quantize(x, (1, 128))
    assert m.scales.tolist()[0] == [2.0, pytest.approx(fp8.LEAST / 448)]
    assert m.q[0, :3].float().tolist() == [448.0, -1.5, 0.0]
    assert m.scales[1, 1].item() == pytest.approx(7 / 448)
    assert m.dequantize()[1, 255].item() == pytest.approx(7.0)
    partial = fp8.quantize(torch.randn(300, 130), (128, 128))
    assert partial.scales.shape == (3, 2)
    with pytest.raises(SchemeError, match="need \\(3, 2\\)"):
        Fp8Matrix(partial.q, partial.scales[:2], (128, 128))


def test_definition_error():
    """Random values come back within e4m3's step: half of 2**-3 of each, and about 2.6% over all."""
    x = torch.randn(256, 512)
    back = fp8.quantize(x, (128, 128)).dequantize()
    assert ((back - x).abs() <= x.abs() / 16 + 1e-4).all()
    assert 0.02 < error(back, x) < 0.03


# ---- the quantizer ----


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (260, 392), (1, 128)], ids=str)
def test_quantizer_gives_the_same_bits(block, shape):
    x = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
    x[: shape[0] // 3, : shape[1] // 3] = 0
    expected = fp8.quantize(x, block)
    for plan in PLANS if block[0] > 1 else [block_quant.plan_for(*shape, block)]:
        for _ in range(2 if GPU else 1):  # a second launch finds the counters as the first one did
            assert same_bits(block_quant.fp8_block_quant(x, block, plan), expected), plan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_quantizer_rows(dtype):
    """One scale per token of any length, rows apart in memory, and extreme magnitudes."""
    x = torch.randn(5, 4200, device=DEVICE).to(dtype)[:, :4190]
    x[1] *= 1e-6
    x[2] = 0
    x[3, 7] = 60000.0
    assert same_bits(block_quant.fp8_block_quant(x, (1, 4190)), fp8.quantize(x, (1, 4190)))
    assert block_quant.fp8_block_quant(x[:0], (1, 128)).q.shape == (0, 4190)


# ---- products ----

OPERANDS = [
    ((1, 128), (128, 128)),
    ((1, 128), (256, 256)),
    ((256, 256), (256, 256)),
    ((128, 128), (128, 128)),
    (None, (128, 128)),
]


def product(M, N, K, x_block, w_block, dtype):
    """x as it goes in, w, the bias, and the product by the definition."""
    x0 = torch.randn(M, K, device=DEVICE).to(dtype)
    w = fp8.quantize(torch.randn(N, K, device=DEVICE) * torch.rand(N, 1, device=DEVICE), w_block or (1, K))
    x = fp8.quantize(x0, x_block or (1, K))
    bias = torch.randn(N, device=DEVICE).to(dtype)
    return x0, x, w, bias, x.dequantize() @ w.dequantize().T + bias.float()


@pytest.mark.parametrize("blocks", OPERANDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 33, 256), (5, 200, 272)] + [(70, 64, 1040)] * GPU, ids=str)
def test_triton_products(blocks, shape):
    M, N, K = shape
    _, x, w, bias, ref = product(M, N, K, *blocks, torch.float16)
    for config in (gemm_triton.SPLITK_CONFIGS[0], gemm_triton.config_for(M, N, K)):
        y = gemm_triton.fp8_gemm(x, w, bias, torch.float16, config)
        assert y.shape == (M, N)
        assert error(y, ref) < TOLERANCE, config
        assert not GPU or torch.equal(y, gemm_triton.fp8_gemm(x, w, bias, torch.float16, config))


@pytest.mark.parametrize("shape", [(1, 33, 256), (17, 72, 272)], ids=str)
def test_triton_products_of_unrounded_activations(shape):
    M, N, K = shape
    x0, _, w, bias, _ = product(M, N, K, (1, 128), (128, 128), torch.float16)
    y = gemm_triton.fp8_gemm(x0, w, bias, torch.float16, gemm_triton.config_for(M, N, K))
    assert error(y, x0.float() @ w.dequantize().T + bias.float()) < TOLERANCE


@pytest.mark.parametrize("block", [(128, 128), (256, 256), (1, 272)], ids=str)
def test_widened_products(block):
    """Several slabs, the last one partial."""
    x0, _, w, bias, _ = product(5, 600, 272, None, block, torch.float16)
    ref = x0.float() @ w.dequantize(torch.float16).float().T + bias.float()
    assert error(matmul.widened_product(x0, w, bias, torch.float16, {"SLAB_BYTES": 2 * 272 * 256}), ref) < 1e-3


def test_a_wrong_scale_is_seen():
    """The gate can fail: one block's scale off by 2 shows."""
    _, x, w, bias, ref = product(5, 200, 400, (1, 128), (128, 128), torch.float16)
    w.scales[1, 2] *= 2
    assert error(gemm_triton.fp8_gemm(x, w, bias, torch.float16, gemm_triton.config_for(5, 200, 400)), ref) > 4 * TOLERANCE


# ---- Hopper ----

wgmma = pytest.importorskip("lowq_kernels.fp8.gemm_wgmma", reason="NVRTC is not installed")
from machine_code import without_spills


@pytest.mark.parametrize("config", wgmma.CONFIGS[::3], ids=str)
def test_wgmma_compiles_without_spills(config):
    modes = (2, 1) if config["SWAP"] else (1, 2)
    used = without_spills("fp8_gemm.cu", wgmma.expression(config, config["TILE_COLUMNS"] // 8 % 2, modes), "sm_90a")
    assert used["registers"] <= (112 if config["BLOCKS_PER_SM"] == 2 else 168)
    assert wgmma.plan(config, modes)[0] >= 3


def test_stages_stay_with_their_warpgroup():
    """Warpgroups take chunks in turn: with an odd ring each would skip phases of barriers and read what is not there yet."""
    for config, modes in itertools.product(wgmma.SMALL, ((2, 1), (2, 2), (0, 0))):
        assert wgmma.plan(config, modes)[0] % config["WARPGROUPS_K"] == 0, (config, modes)


def test_wgmma_refuses():
    x, w = fp8.quantize(torch.randn(4, 264), (1, 128)), fp8.quantize(torch.randn(64, 264), (128, 128))
    assert "not a multiple of 16" in wgmma.refuse(Fp8Call.of(x, w, torch.float16), wgmma.LARGE[0])
    odd = fp8.quantize(torch.randn(64, 256), (64, 128))
    even = fp8.quantize(torch.randn(4, 256), (1, 128))
    assert "64x128" in wgmma.refuse(Fp8Call.of(even, odd, torch.float16), wgmma.LARGE[0])


EMULATED = [  # M, N, K, blocks of x and of W, config, SMs
    (300, 392, 656, (None, None), (1, 1, 8, 1, 2, 2, 2048), 9),
    (20, 200, 400, ((1, 128), (128, 128)), (1, 1, 32, 2, 2, 1, 2048), 132),
    (64, 130, 1040, ((1, 128), (256, 256)), (1, 1, 64, 1, 2, 1, 2048), 2),
    (9, 65, 656, ((1, 128), (128, 128)), (1, 1, 16, 4, 1, 2, 2048), 132),
    (300, 264, 400, ((1, 128), (128, 128)), (0, 2, 128, 1, 1, 1, 2048), 2),
    (300, 200, 656, ((256, 256), (256, 256)), (0, 1, 128, 1, 1, 1, 2048), 1),
]


def emulated(case):
    """(y of both launches of a case, what it is to be)."""
    M, N, K, blocks, config, sms = case
    _, x, w, bias, ref = product(M, N, K, *blocks, torch.bfloat16)
    x, w = (fp8.Fp8Matrix(m.q.cpu(), m.scales.cpu(), m.block) for m in (x, w))
    config = dict(zip(wgmma.KEYS, config, strict=True))
    with emulation.hopper(wgmma), emulation.sms(sms):
        return emulation.twice(lambda: wgmma.fp8_gemm(x, w, bias.cpu(), torch.bfloat16, config)), ref.cpu()


@pytest.fixture(scope="module")
def built():
    """The instances of all cases by one run of g++."""
    with emulation.built_at_once():
        for case in EMULATED:
            emulated(case)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_wgmma_emulated(case):
    """The device code on the CPU, threads in two orders, wgmma as early and as late as it may read: the same bits."""
    y, ref = emulated(case)
    assert error(y, ref) < TOLERANCE


HOPPER = Fp8Call(16, 4096, 4096, (1, 128), (128, 128), torch.bfloat16, "cuda", (9, 0))
DISPATCHED = [
    (HOPPER, "cuda/fp8_gemm"),
    (replace(HOPPER, M=4096), "cuda/fp8_gemm"),
    (replace(HOPPER, K=4104), "triton/fp8_gemm"),
    (replace(HOPPER, capability=(8, 9)), "triton/fp8_gemm"),
    (replace(HOPPER, capability=(10, 0)), "triton/fp8_gemm"),
    (replace(HOPPER, x_block=None), "triton/fp8_gemm"),
    (replace(HOPPER, x_block=None, M=512), "fp8_widened"),
]


@pytest.mark.parametrize(("call", "name"), DISPATCHED, ids=str)
def test_dispatch(call, name, monkeypatch):
    spec, config = select(call)
    assert spec.name == name
    assert config in spec.legal_configs(call)
    for other in kernels("fp8_product"):
        monkeypatch.setenv("LOWQ_KERNEL", other)
        if why := named(other).why_not(call):
            with pytest.raises(UnsupportedError, match=re.escape(f"{other} was requested but {why}")):
                select(call)
        else:
            assert select(call)[0].name == other


def test_scales_that_a_step_would_mix_are_refused():
    """A step of 128 codes has one scale a row: with one per 96 the product would be wrong without a word."""
    assert "takes multiples of 128" in (named("triton/fp8_gemm").why_not(replace(HOPPER, x_block=(1, 96))) or "")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
@pytest.mark.parametrize("blocks", [*OPERANDS[:4], ((1, 256), (1, 256))], ids=str)
@pytest.mark.parametrize("M", [1, 3, 8, 17, 64, 129, 300])
def test_wgmma_products(blocks, M):
    """Every legal config, odd edges; the same bits twice."""
    if blocks[0] == blocks[1] == (1, 256):
        blocks = (None, None)
    for (N, K), dtype in itertools.product([(200, 400), (1000, 656), (392, 2064)], [torch.bfloat16, torch.float16]):
        _, x, w, bias, ref = product(M, N, K, *blocks, dtype)
        call = Fp8Call.of(x, w, dtype)
        spec, chosen = select(call)
        assert spec.name == "cuda/fp8_gemm"
        for config in [chosen, *spec.legal_configs(call)[M % 5 :: 5]]:
            y = wgmma.fp8_gemm(x, w, bias, dtype, config)
            assert error(y, ref) < TOLERANCE, config
            assert torch.equal(y, wgmma.fp8_gemm(x, w, bias, dtype, config)), config


# ---- activations and the layer ----


def test_int8_rows_by_hand():
    x = torch.tensor([[0.0, 1.0, -127.0, 63.4], [0.0, 0.0, 0.0, 0.0]])
    q, scales = activations.int8_rows(x)
    assert q.tolist() == [[0, 1, -127, 63], [0, 0, 0, 0]]
    assert scales[0].item() == 1.0
    assert torch.equal(activations.rounded(x, "int8")[0], torch.tensor([0.0, 1.0, -127.0, 63.0]))


def test_rounding_of_activations():
    x = torch.randn(40, 512).to(torch.bfloat16)
    assert activations.rounded(x, "none") is x
    assert 0.003 < error(activations.rounded(x, "int8"), x.float()) < 0.015
    assert 0.02 < error(activations.rounded(x, "fp8", 128), x.float()) < 0.03
    assert activations.rounded(x, "fp8").dtype == torch.bfloat16


@pytest.mark.parametrize("act", ["fp8", "none"])
def test_layer(act):
    """What a layer answers is its weight times its rounded input, on any device."""
    w = fp8.quantize(torch.randn(200, 400, device=DEVICE), (128, 128))
    bias = torch.randn(200, device=DEVICE)
    p = PackedWeight(w.q, w.scales, None, Scheme.in_blocks(w.block), 200, 400, "e4m3")
    layer = QuantLinear.from_packed(p, bias, dtype=torch.float16)
    layer.set_act(act)
    assert (layer.layout == matmul.WIDENED) is not matmul.has_fp8(DEVICE)
    x = torch.randn(2, 3, 400, device=DEVICE).to(torch.float16)
    flat = activations.rounded(x.reshape(6, 400), act, 128).float()
    ref = (flat @ w.dequantize().T + bias.to(torch.float16).float()).reshape(2, 3, 200)
    y = layer(x)
    assert y.dtype == torch.float16
    assert error(y, ref) < TOLERANCE


def test_layer_refuses():
    scheme = Scheme.in_blocks((128, 128))
    with pytest.raises(UnsupportedError, match="not in int8"):
        QuantLinear(8, 16, scheme).set_act("int8")
    with pytest.raises(SchemeError, match="takes K=16"):
        QuantLinear(8, 16, scheme)(torch.zeros(1, 8))
    with pytest.raises(SchemeError, match="holds no weight yet"):
        QuantLinear(8, 16, scheme, device="meta").prepare()


@pytest.mark.parametrize("hold", [lambda layer: layer, lambda layer: layer.prepare()], ids=["as in files", "widened on a CPU"])
def test_casts_leave_weights_of_blocks_as_they_are(hold):
    """`model.to(dtype)` changes bias and what the layer computes in; codes, and scales in fp32, only move."""
    layer = hold(QuantLinear(200, 400, Scheme.in_blocks((128, 128)), bias=True, dtype=torch.bfloat16))
    scales, words = layer.weight_scale.data.clone(), layer.weight.data.clone()
    layer.to(torch.float16)
    assert (layer.dtype, layer.bias.dtype, layer.weight_scale.dtype) == (torch.float16, torch.float16, torch.float32)
    assert torch.equal(layer.weight_scale, scales)
    assert torch.equal(layer.weight.float(), words.float())
    assert layer.weight.dtype == (torch.float16 if layer.layout == matmul.WIDENED else fp8.FP8)
    assert layer.to("meta").weight_scale.is_meta
