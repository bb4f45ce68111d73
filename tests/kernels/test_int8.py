"""Activations in int8 against the definition: rows rounded by lowq_kernels.activations, dequantized weights, fp32 products."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from emulation import error
from lowq_kernels.activations import STEPS, int8_rows, rounded
from lowq_kernels.dispatch.registry import Call, after_rounding, matmul
from lowq_kernels.modules.linear import QuantLinear
from lowq_packers.errors import UsageError
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from papers import PAPERS
from papers import gemm_int8 as kernel

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SPEC = PAPERS["triton/gemm_int8"]


@pytest.fixture(autouse=True)
def poisoned():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def weight(N: int, K: int, group: int, bits: int, zero: str) -> QuantizedTensor:
    G = K // group
    zeros = {
        "none": None,
        "int": torch.randint(0, 2**bits, (N, G)).half(),
        "float": (torch.rand(N, G) * (2**bits - 1)).half(),
    }[zero]
    W_q = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8)
    return QuantizedTensor(W_q, (torch.rand(N, G) * 0.009 + 0.001).half(), zeros, bits, group, zero).to(DEVICE)


@pytest.mark.parametrize("K", [128, 416, 4160])
def test_rows_are_those_of_the_definition(K):
    x = torch.randn(5, K, device=DEVICE).half()
    x[1] = 0
    x[2, 3] = 6e4
    q, scales, sums = kernel.quantize_rows(x, 32)
    expected, wanted_scales = int8_rows(x)
    assert torch.equal(q, expected)
    assert torch.equal(scales, wanted_scales[:, 0])
    assert torch.equal(sums.t(), expected.float().view(5, -1, 32).sum(-1))


def test_rounding_is_by_quotients():
    """torch turns `127.0 / x` into a rounded reciprocal times 127, and on GPUs `x / 127.0` into a product as well."""
    x = torch.randn(64, 2048, device=DEVICE).half()
    q, scales = int8_rows(x)
    most = x.double().abs().amax(1, keepdim=True)
    assert torch.equal(scales, (most / 127).float())
    assert torch.equal(q, (x.float() * (127 / most).float()).round().to(torch.int8))


@pytest.mark.parametrize(("bits", "zero"), list(itertools.product((8, 4, 2), ("float", "int", "none"))))
def test_products(bits, zero):
    """Sums are whole numbers, so that only the scales and the output round: 3e-4 in fp16."""
    for M, N, K, group in [(5, 72, 256, 64), (17, 33, 128, 128)] + [(130, 200, 1024, 128), (64, 96, 512, 32)] * GPU:
        w = weight(N, K, group, bits, zero)
        p, x, bias = pack(w, "strided"), torch.randn(M, K, device=DEVICE).half(), torch.randn(N, device=DEVICE).half()
        ref = rounded(x.float(), "int8") @ w.dequantize().t() + bias.float()
        call = Call(M, N, K, w.scheme, "strided", x.dtype, "cuda", (9, 0), "int8")
        legal = SPEC.legal_configs(call)
        for config in legal if GPU else [SPEC.default_config(call, legal), legal[-1]]:
            y = kernel.gemm_int8(x, p, bias, config)
            assert error(y, ref) < 1e-3, config
    p.scales[0] *= 2  # and the gate can fail
    assert error(kernel.gemm_int8(x, p, bias, config), ref) > 1e-2


def test_dispatch():
    """Activations are rounded before the kernels that win; the int8 kernel takes no others."""
    call = Call(3, 64, 128, weight(64, 128, 64, 4, "float").scheme, "strided", torch.float16, "cuda", (9, 0), "int8")
    assert SPEC.why_not(call) is None
    assert [after_rounding(call, name).act for name in (None, "triton/gemm")] == ["none", "none"]
    w = weight(64, 128, 64, 4, "float")
    x = torch.randn(3, 128, device=DEVICE).half()
    assert SPEC.why_not(Call(3, 64, 128, w.scheme, "strided", x.dtype, "cuda", (9, 0))) == "takes activations as int8, not none"
    p, many = pack(w, "rowstream"), torch.randn(STEPS + 1, 128, device=DEVICE).half()
    for act in ("int8", "fp8"):
        y = matmul(many, p, act=act)
        assert torch.equal(y, matmul(rounded(many, act), p))
        assert not torch.equal(y, matmul(many, p))
        assert torch.equal(matmul(many[:STEPS], p, act=act), matmul(many[:STEPS], p))  # a step's rows stay as they are


def test_layer():
    w = weight(64, 128, 64, 4, "float")
    layer = QuantLinear.from_quantized(w)
    x = torch.randn(STEPS + 1, 128, device=DEVICE).half()
    plain = layer(x)
    layer.set_act("int8")
    assert error(layer(x), rounded(x, "int8").float() @ w.dequantize().t()) < 2e-3
    assert not torch.equal(layer(x), plain)
    with pytest.raises(UsageError, match="act='int4' does not exist"):
        layer.set_act("int4")
