"""Products that add to the residual stream, take its norm, or multiply act(gate) by up (fold.cuh), emulated on the CPU."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import emulation
from lowq_kernels.dispatch import policy, registry
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

emulation.require("cuda/tile_mma")
from lowq_kernels.decode import fold, reference
from lowq_kernels.modules.linear import QuantLinear
from lowq_kernels.products.cuda import tile_mma

F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 1.5e-3, BF16: 8e-3}
EPS = 1e-5
K, N = 640, 256
CASES = [  # bits, dtype, rows, activation, tile_mma.KEYS
    pytest.param(4, F16, 1, "silu", (8, 2, 256, 1, 2), id="4-bit"),
    pytest.param(2, F16, 1, "silu", (8, 2, 256, 2, 1, 1), id="2-bit-planes"),
    pytest.param(2, BF16, 2, "gelu_tanh", (4, 4, 512, 1, 1, 1), id="2-bit-planes-2-rows"),
    pytest.param(2, F16, 8, "gelu_tanh", (4, 2, 128, 2, 1), id="2-bit-8-rows"),
    pytest.param(3, BF16, 5, "silu", (16, 2, 256, 1, 1), id="3-bit-bf16-5-rows"),
    pytest.param(8, F16, 3, "silu", (2, 4, 256, 1, 1), id="8-bit-3-rows-4-tiles"),
]


@pytest.fixture(autouse=True, scope="module")
def gpu():
    """Launchers see a GPU of capability 9.0 behind CPU tensors; one run of g++ builds the instances of all cases."""
    with emulation.hopper(tile_mma):
        with emulation.built_at_once():
            for case in CASES:
                through_a_layer(*case.values)
        yield


def layer_of(bits, dtype, bias=True):
    q = emulation.weight(N, K, bits, 64, "float", dtype)
    b = torch.linspace(-1, 1, N).to(dtype) if bias else None
    return QuantLinear.from_packed(pack(q, "tile"), b, layout="tile"), q.dequantize().float(), b.float()


def close(y, ref, dtype):
    error = emulation.error(y, ref)
    assert error < TOLERANCE[dtype], f"error {error:.1e}"


def through_a_layer(bits, dtype, M, act, values):
    """Pairs (what the kernels make, what it is to be) by name; "wrong" is the product by squares that are 10% off."""
    layer, W, bias = layer_of(bits, dtype)
    g = torch.Generator().manual_seed(M)
    y, residual = torch.randn(M, K, generator=g).to(dtype), torch.randn(M, N, generator=g).to(dtype)
    weight, scale = (torch.rand(N, generator=g) + 0.1).to(dtype), torch.rand(M, generator=g) + 0.3
    wide = torch.randn(M, K, generator=g).to(dtype)  # of K features, so that the same weight can take it
    gain = (torch.rand(K, generator=g) + 0.1).to(dtype)
    prescale = torch.rand(M, generator=g) + 0.3
    prepared = (wide.float() * gain.float() * prescale[:, None]).to(dtype)
    stream = fold.Residual(prepared, wide.float().square().reshape(M, -1, fold.SQUARES).sum(-1), prescale, EPS)

    def add():
        r = residual.clone()
        s = fold.product_add(layer, y, r, weight, EPS, scale)
        return r, s.x, s.squares

    chosen = registry.named("cuda/tile_mma_folded"), tile_mma.config_of(*values)
    with mock.patch.object(fold, "select", return_value=chosen):
        r, x, squares = emulation.twice(add)
        product, inverse = emulation.twice(lambda: fold.norm_product(layer, stream))
        gated, _ = emulation.twice(lambda: fold.norm_product_gate(layer, stream, act))
        wrong, _ = fold.norm_product(layer, replace(stream, squares=stream.squares * 1.1))
    sums = residual.float() + y.float() @ W.t() + bias
    normed = reference.rms_norm(wide, gain, EPS) @ W.t() + bias
    return {
        "sums": (r, sums),
        "x": (x, sums * weight.float() * scale[:, None]),
        "squares": (squares, r.float().square().reshape(M, -1, fold.SQUARES).sum(-1)),
        "product": (product, normed),
        "inverse": (inverse, torch.rsqrt(wide.float().square().mean(-1) + EPS)),
        "gated": (gated, reference.gated(normed, act)),
        "wrong": (wrong, normed),
    }


@pytest.mark.parametrize(("bits", "dtype", "M", "act", "values"), CASES)
def test_a_stream_through_a_layer(bits, dtype, M, act, values):
    """x += y W^T, then RMSNorm(x) times a square of that weight, then act(gate) * up, against the plain operations in fp32."""
    made = through_a_layer(bits, dtype, M, act, values)
    with pytest.raises(AssertionError, match="error"):
        close(*made.pop("wrong"), dtype)
    assert torch.allclose(*made.pop("inverse"), rtol=1e-5)
    close(*made.pop("squares"), F16)
    for pair in made.values():
        close(*pair, dtype)


def test_layers_that_cannot_be_fused_say_why():
    why = "takes layers on a GPU, packed or in 16 bits"
    assert fold.why_not(torch.nn.Linear(4, 4), 1, F16, fold.NORMED) == why
    with FakeTensorMode():  # a layer on a GPU that is not there
        in_fp8 = QuantLinear(256, 256, Scheme.in_blocks((128, 128)), device="cuda")
        assert in_fp8.weight.is_cuda
        assert fold.why_not(in_fp8, 1, F16, fold.NORMED) == why


@pytest.mark.parametrize(
    ("changed", "doing", "why"),
    [
        ({}, tile_mma.NORMED, None),
        ({}, tile_mma.ADDED, None),
        ({}, tile_mma.SILU, None),
        ({"K": 4096 + 32}, tile_mma.NORMED, "rows of x that are a multiple of 64"),
        ({"N": 4096 + 8}, tile_mma.ADDED, "whole row tiles"),
        ({"M": 64, "N": 28672}, tile_mma.ADDED, "cuda/tile_wgmma computes this product"),
        ({"device": "cpu", "layout": "rowstream"}, tile_mma.ADDED, "runs on cuda, not on cpu"),
    ],
)
def test_which_products_may(changed, doing, why):
    product = replace(registry.Call(1, 4096, 4096, Scheme(4, 32), "tile", F16, "cuda", (9, 0)), **changed)
    call = fold.FoldedCall(product, doing, None)
    result = registry.find(call)
    if why is None:
        assert result[0].name == "cuda/tile_mma_folded"
        assert result[1] in result[0].legal_configs(call)
    else:
        assert result is None
        assert why in registry.refusals(call)["cuda/tile_mma_folded"]


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_gate_and_up_take_the_kernel_that_is_fast_in_a_step(bits):
    """Not what the rule takes alone, even where that has pairs of row tiles; but what a table, made in whole steps, says."""
    call = registry.Call(1, 28672, 4096, Scheme(bits, 128), "tile", F16, "cuda", (9, 0))

    def config(doing):
        return registry.select(fold.FoldedCall(call, doing, None))[1]

    with registry.asking():
        alone, pairs = registry.select(call)[1], policy.gate_up(call, tile_mma.KEYS)[0]
        assert (config(tile_mma.SILU), config(tile_mma.NORMED)) == (pairs, alone)
    in_steps, odd = tile_mma.config_of(8, 2, 256, 2, 1), tile_mma.config_of(8, 1, 256, 1, 1)
    for choice, expected in ((in_steps, in_steps), (odd, pairs)):
        with registry.asking(lambda call, choice=choice: ("cuda/tile_mma", choice)):
            assert config(tile_mma.GELU_TANH) == expected
