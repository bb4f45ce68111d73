"""CUDA kernels on a GPU against fp32 truth: every width, dtype, group kind, odd shapes, every config; NaN-poisoned outputs."""

import itertools
from unittest import mock

import pytest
import torch

from emulation import error, poisoned
from lowq_kernels.dispatch import registry
from lowq_kernels.dispatch.registry import Call
from lowq_kernels.products.dense_call import DenseCall
from lowq_packers.layouts import pack
from lowq_packers.qtensor import QuantizedTensor
from lowq_packers.scheme import BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
SPECS = [s for name, s in registry.kernels().items() if name.startswith("cuda/") and "none" in s.acts]  # others: test_tile8.py


def weight(N, K, bits, group, zero, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    W_q = torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8, generator=g, device="cuda")
    G = K // group
    scales = torch.rand(N, G, generator=g, device="cuda") * 0.009 + 0.001
    scales[:, 1::2] *= 0.25  # 8 bits: under the limit of codes without magic (tile.cuh); the others are over it
    scales = (2 * scales).to(dtype)
    zeros = (torch.rand(N, G, generator=g, device="cuda") * ((1 << bits) - 1)).to(dtype)
    zeros = None if zero == "none" else zeros.round() if zero == "int" else zeros
    return QuantizedTensor(W_q, scales, zeros, bits, group, zero)


def run(spec, q, M, dtype, configs=None, bias=None, x=None):
    """Largest relative error of `spec` over its configs (or the first few), each run twice for equal bits."""
    N, K = q.shape
    worst, tried = 0.0, 0
    if x is None:
        x = torch.randn(M, K, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(M))
    ref = x.float() @ q.dequantize().t()
    if bias is not None:
        ref = ref + bias.float()
    for layout in spec.layouts:
        p = pack(q, layout)
        call = Call.of(x, p)
        if spec.why_not(call):
            continue
        legal = spec.legal_configs(call)
        for config in legal if configs is None else legal[:: max(1, len(legal) // configs)]:
            with mock.patch("torch.empty", poisoned):
                y = spec.launch(x, p, bias, config)
                again = spec.launch(x, p, bias, config)
            assert y.shape == (M, N)
            assert y.dtype == dtype
            assert torch.equal(y, again), f"{spec.name} {config}: two runs differ"
            err = error(y, ref)
            assert err < TOLERANCE[dtype], f"{spec.name} {config} {layout}: error {err:.2e}"
            worst, tried = max(worst, err), tried + 1
    if not tried:
        pytest.skip(f"{spec.name} takes no such call")
    return worst


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("zero", ["float", "none"])
@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128, 0], ids=lambda g: f"g{g or 'K'}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("bits", BITS, ids=lambda b: f"b{b}")
def test_every_width_group_and_zero(spec, bits, dtype, group, zero):
    """K = 1152 is a multiple of every group and of no chunk of 256; N = 200 leaves a tail."""
    q = weight(200, 1152, bits, group or 1152, zero, dtype)
    for M in (1, 7, 16, 40):
        if not spec.m_range[0] <= M <= spec.m_range[1]:
            continue
        run(spec, q, M, dtype, configs=2)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("bits", BITS, ids=lambda b: f"b{b}")
def test_every_config(spec, bits):
    q = weight(576, 4096, bits, 128, "float", torch.float16)
    for M in (1, 8, 9, 17, 25, 64, 130):
        if spec.m_range[0] <= M <= spec.m_range[1]:
            run(spec, q, M, torch.float16)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("bits", BITS, ids=lambda b: f"b{b}")
@pytest.mark.parametrize(("N", "K", "group"), [(1, 16, 16), (33, 100, 100), (65, 272, 16), (130, 1000, 1000), (15, 4112, 16)])
def test_tails(spec, bits, N, K, group):
    q = weight(N, K, bits, group, "float", torch.float16)
    for M in (1, 3, 18, 65):
        if spec.m_range[0] <= M <= spec.m_range[1]:
            run(spec, q, M, torch.float16, configs=3)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_bias_large_m_and_misaligned_x(spec):
    q = weight(320, 512, 4, 64, "float", torch.float16)
    bias = torch.randn(320, device="cuda", dtype=torch.float16)
    for M in (5, 300, 700):
        if spec.m_range[0] <= M <= spec.m_range[1]:
            run(spec, q, M, torch.float16, configs=2, bias=bias)
            flat = torch.randn(M * 512 + 1, device="cuda", dtype=torch.float16)
            run(spec, q, M, torch.float16, configs=1, x=flat[1:].view(M, 512))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("codes", [0, "max"])
def test_constant_codes(spec, codes):
    """All-minimum and all-maximum codes: the ends of the range, where magic numbers overflow."""
    for bits, dtype in itertools.product(BITS, (torch.float16, torch.bfloat16)):
        q = weight(128, 512, bits, 128, "float", dtype)
        q = QuantizedTensor(torch.full_like(q.W_q, 0 if codes == 0 else (1 << bits) - 1), q.scales, q.zeros, bits, 128)
        if bits in spec.bits:
            run(spec, q, 4, dtype, configs=1)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_one_flipped_code_shows(spec):
    """The test above can fail: one wrong code of 64 raises the error over the tolerance."""
    q = weight(64, 64, 4, 64, "float", torch.float16)
    wrong = q.W_q.clone()
    wrong[q.scales.flatten().argmax(), 5] ^= 8  # of the largest scale, else it may drown in the other rows
    p_dtype = torch.float16
    x = torch.randn(4, 64, device="cuda", dtype=p_dtype)
    for layout in spec.layouts:
        p = pack(QuantizedTensor(wrong, q.scales, q.zeros, 4, 64), layout)
        call = Call.of(x, p)
        if reason := spec.why_not(call):
            pytest.skip(reason)
        y = spec.launch(x, p, None, spec.legal_configs(call)[0])
        assert error(y, x.float() @ q.dequantize().t()) > TOLERANCE[p_dtype]


def test_cuda_graph_and_streams():
    """Replays of a captured graph see new inputs; the current stream is used."""
    q = weight(512, 512, 4, 128, "float", torch.float16)
    p, x = pack(q, "tile"), torch.randn(2, 512, device="cuda", dtype=torch.float16)
    registry.matmul(x, p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = registry.matmul(x, p)
        y = registry.matmul(y, p)
    x.copy_(torch.randn_like(x))
    graph.replay()
    ref = (x.float() @ q.dequantize().t()).half().float() @ q.dequantize().t()
    assert error(y, ref) < 3e-3
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = registry.matmul(x, p)
    side.synchronize()
    assert error(z, x.float() @ q.dequantize().t()) < 2e-3


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 4096, 4096), (3, 40, 72), (8, 129, 1032), (5, 6144, 2880), (1, 201088, 2880)])
def test_a_weight_that_is_not_packed(M, N, K, dtype):
    spec = registry.named("cuda/dense_mma")
    g = torch.Generator("cuda").manual_seed(N)
    x, W, bias = (torch.randn(s, device="cuda", generator=g).to(dtype) for s in ((M, K), (N, K), (N,)))
    truth = x.double() @ W.double().t() + bias.double()
    for config in spec.legal_configs(DenseCall.of(M, W)):
        with mock.patch("torch.empty", poisoned):
            y, again = (spec.launch(x, W, bias, config) for _ in range(2))
        assert torch.equal(y, again)
        assert error(y, truth) < TOLERANCE[dtype], config
