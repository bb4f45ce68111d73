"""Products by weights in 16 bits, and what they do for their neighbours (dense_mma.cu), emulated on the CPU."""

import itertools
from unittest import mock

import pytest
import torch

import emulation

emulation.require("cuda/tile_mma")
from lowq_kernels.decode import fold, reference
from lowq_kernels.dispatch import registry
from lowq_kernels.modules import joined
from lowq_kernels.products.cuda import dense_mma
from lowq_kernels.products.dense_call import DenseCall

F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 1e-3, BF16: 8e-3}
EPS = 1e-5
SHAPES = [  # dtype, M, N, K, dense_mma.KEYS
    pytest.param(F16, 1, 40, 72, (8, 1, 128, 2), id="ends-of-N-and-K"),
    pytest.param(BF16, 8, 64, 648, (4, 2, 64, 4), id="8-rows"),
    pytest.param(F16, 11, 33, 264, (8, 1, 64, 3), id="two-blocks-of-rows"),
    pytest.param(BF16, 3, 16, 2048, (4, 1, 128, 4), id="several-steps"),
]
STREAMS = [(8, 2, 64, 2), (4, 2, 64, 4)]  # dense_mma.KEYS
TYPES = [(F16, "silu"), (BF16, "gelu_tanh")]


def config_of(values):
    return dict(zip(dense_mma.KEYS, values, strict=True))


@pytest.fixture(autouse=True, scope="module")
def gpu():
    """Launchers see a GPU of capability 9.0 behind CPU tensors; one run of g++ builds the instances of all tests."""
    with emulation.hopper(dense_mma):
        with emulation.built_at_once():
            for dtype, M, N, K, values in (p.values for p in SHAPES):
                x, W, bias = drawn(dtype, M, N, K)
                dense_mma.dense_mma(x, W, bias, config_of(values))
            for values, (dtype, act) in itertools.product(STREAMS, TYPES):
                through_a_layer(values, dtype, act)
        yield


def drawn(dtype, M, N, K):
    g = torch.Generator().manual_seed(M)
    x, W = torch.randn(M, K, generator=g).to(dtype), (torch.randn(N, K, generator=g) / K**0.5).to(dtype)
    x[M // 2] *= 40
    return x, W, torch.linspace(-1, 1, N).to(dtype)


@pytest.mark.parametrize(("dtype", "M", "N", "K", "values"), SHAPES)
def test_a_product(dtype, M, N, K, values):
    x, W, bias = drawn(dtype, M, N, K)
    y = emulation.twice(lambda: dense_mma.dense_mma(x, W, bias, config_of(values)))
    truth = x.double() @ W.double().t() + bias.double()
    assert ((y.double() - truth).norm(dim=1) / truth.norm(dim=1)).max() < TOLERANCE[dtype]
    assert emulation.error(y, truth.roll(1, 1)) > 0.1  # columns that change places show


def through_a_layer(values, dtype, act):
    """(what the kernels make, what it is to be, tolerance) by name: x += y W^T, RMSNorm(x) times a weight, act(gate) * up."""
    chosen, N, K = (registry.named("cuda/dense_mma_folded"), config_of(values)), 256, 640
    y, W, bias = drawn(dtype, 1, N, K)
    layer, g = joined.dense(W, bias), torch.Generator().manual_seed(7)
    residual, weight = torch.randn(1, N, generator=g).to(dtype), (torch.rand(N, generator=g) + 0.1).to(dtype)
    scale = torch.rand(1, generator=g) + 0.3
    wide, gain = torch.randn(1, K, generator=g).to(dtype), (torch.rand(K, generator=g) + 0.1).to(dtype)
    prepared = (wide.float() * gain.float() * scale[:, None]).to(dtype)
    stream = fold.Residual(prepared, wide.float().square().reshape(1, -1, fold.SQUARES).sum(-1), scale, EPS)

    def add():
        r = residual.clone()
        s = fold.product_add(layer, y, r, weight, EPS, scale)
        return r, s.x, s.squares

    with mock.patch.object(fold, "select", return_value=chosen):
        r, x, squares = emulation.twice(add)
        product, inverse = emulation.twice(lambda: fold.norm_product(layer, stream))
        gated, _ = emulation.twice(lambda: fold.norm_product_gate(layer, stream, act))
    sums = residual.float() + y.float() @ W.float().t() + bias.float()
    normed = reference.rms_norm(wide, gain, EPS).float() @ W.float().t() + bias.float()
    return {
        "sums": (r, sums, TOLERANCE[dtype]),
        "x": (x, sums * weight.float() * scale[:, None], TOLERANCE[dtype]),
        "squares": (squares, r.float().square().reshape(1, -1, fold.SQUARES).sum(-1), 1e-3),
        "product": (product, normed, 2 * TOLERANCE[dtype]),
        "inverse": (inverse, torch.rsqrt(wide.float().square().mean(-1) + EPS), 1e-5),
        "gated": (gated, reference.gated(normed, act), 2 * TOLERANCE[dtype]),
    }


@pytest.mark.parametrize(("dtype", "act"), TYPES)
@pytest.mark.parametrize("values", STREAMS)
def test_a_stream_through_a_layer(values, dtype, act):
    """As tile_mma's in test_fold_emulated.py."""
    for name, (result, truth, tolerance) in through_a_layer(values, dtype, act).items():
        assert emulation.error(result, truth) < tolerance, name


def test_which_products_may():
    weight = torch.empty(4096, 4096, dtype=F16, device="meta")
    call = DenseCall(1, *weight.shape, F16, "cuda", (9, 0))
    assert registry.find(call)[0].name == "cuda/dense_mma"
    assert registry.find(DenseCall(1, 4096, 4100, F16, "cuda", (9, 0))) is None
    assert registry.find(DenseCall(1, 4096, 4096, F16, "cuda", (8, 0))) is None
    for doing, tiles in ((fold.NORMED, (1, 2)), (fold.ADDED, (1, 2)), (fold.NORMED | fold.ACTS["silu"], (2,))):
        spec, config = registry.find(fold.FoldedCall(call, doing, None))
        assert spec.name == "cuda/dense_mma_folded"
        assert config["ROW_TILES"] in tiles


FIRST = [  # N, K, fold, dense_mma.KEYS
    pytest.param(6144, 4096, fold.NORMED, (8, 1, 64, 3), id="8b-qkv-one-round-of-three-an-SM"),
    pytest.param(4096, 4096, fold.ADDED, (16, 2, 64, 1), id="8b-o"),
    pytest.param(28672, 4096, fold.NORMED | fold.ACTS["silu"], (16, 2, 64, 1), id="8b-gate-up"),
    pytest.param(4096, 14336, fold.ADDED, (16, 2, 64, 1), id="8b-down"),
    pytest.param(3072, 2048, fold.NORMED, (8, 1, 128, 2), id="1b-qkv"),
    pytest.param(2048, 2048, fold.ADDED, (8, 1, 128, 2), id="1b-o-two-steps-a-warp"),
    pytest.param(16384, 2048, fold.NORMED | fold.ACTS["silu"], (8, 2, 64, 2), id="1b-gate-up"),
    pytest.param(2048, 8192, fold.ADDED, (16, 1, 128, 1), id="1b-down-a-block-an-SM"),
    pytest.param(128256, 2048, fold.NORMED, (8, 1, 64, 3), id="1b-head"),
]


@pytest.mark.parametrize(("N", "K", "doing", "values"), FIRST)
def test_the_first_config_depends_on_row_tiles_per_sm(N, K, doing, values):
    call = DenseCall(1, N, K, F16, "cuda", (9, 0))
    assert registry.find(fold.FoldedCall(call, doing, None))[1] == dict(zip(dense_mma.KEYS, values, strict=True))
    if not doing & fold.GATED:
        assert registry.find(call)[1] == dict(zip(dense_mma.KEYS, values, strict=True))
