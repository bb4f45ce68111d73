"""What lies between a layer's products on a CPU: decode/cpu.py's C++ against decode/reference.py."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from cpu_sets import plain_isa as isa
from cpu_sets import pytestmark
from emulation import weight
from lowq_kernels.decode import cpu, reference, rows_cpu
from lowq_kernels.decode.prepare import Prepared
from lowq_kernels.decode.reference import Heads, Places
from lowq_kernels.products.cpu import native, packed
from lowq_kernels.products.cpu.repeated import Repeated
from lowq_packers.layouts import pack

__all__ = ["isa", "pytestmark"]
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}  # relative Frobenius error
HEADS = [(8, 2, 64, 64, 0, False), (6, 6, 80, 40, 0, True), (10, 2, 128, 128, 20, False), (4, 4, 16, 16, 7, True)]
HEADS += [(4, 2, 32, 32, 0, False), (6, 2, 96, 96, 37, False)]  # two and three queries share a key


@pytest.fixture
def threads():
    """Sets torch's number of threads, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextmanager
def calls():
    """A list of the library's calls that Python makes inside."""
    native.noting.calls = []
    try:
        yield native.noting.calls
    finally:
        native.noting.calls = None


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(y, ref, dtype):
    return float((y.double() - ref.double()).norm()) <= TOLERANCE[dtype] * float(ref.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("M", "H"), [(1, 256), (3, 72), (17, 513)])
def test_norms_and_gates(isa, dtype, M, H):
    x, delta = (draw(M, H, dtype=dtype, seed=i) for i in (0, 1))
    weight, post = (draw(H, dtype=dtype, seed=i) for i in (2, 3))
    pair = draw(M, 2 * H, dtype=dtype) * 4
    cases = [(None, None), (delta, None), (delta, post)]
    expected = [(a := x.clone(), reference.add_norm(a, d, weight, 1e-5, p)) for d, p in cases]
    gates = [reference.gated(pair, act) for act in ("silu", "gelu_tanh")]
    with calls() as made:
        for (d, p), (stream, ref) in zip(cases, expected, strict=True):
            a = x.clone()
            assert close(cpu.add_norm(a, d, weight, 1e-5, p), ref, dtype)
            assert close(a, stream, dtype)
        for act, ref in zip(("silu", "gelu_tanh"), gates, strict=True):
            assert close(cpu.gated(pair, act), ref, dtype)
        assert [call.what for call, *_ in made] == 3 * [cpu.ADD_NORM] + 2 * [cpu.GATED]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("HQ", "HKV", "D", "R", "window", "normed"), HEADS)
@pytest.mark.parametrize("paged", [False, True])
def test_attention_of_a_step(isa, threads, dtype, HQ, HKV, D, R, window, normed, paged):
    norms = [draw(D, dtype=dtype, seed=i) if normed else None for i in (1, 2)]
    sinks = draw(HQ, dtype=torch.float32, seed=9) + 2 if window else None
    heads = Heads(HQ, HKV, D, D**-0.5, window, 1e-6, *norms, sinks)
    qkv, pos = draw(3, (HQ + 2 * HKV) * D, dtype=dtype), torch.tensor([5, 63, 0], dtype=torch.int32)
    cos, sin = draw(64, R, dtype=dtype, seed=3), draw(64, R, dtype=dtype, seed=4)
    shape = (HKV, 20, 16, D) if paged else (3, HKV, 64, D)
    caches = [draw(*shape, dtype=dtype, seed=i) for i in (5, 6)]
    table = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:12].int().reshape(3, 4) if paged else None
    given = [[c.clone().transpose(0, 1) if paged else c.clone() for c in caches] for _ in range(3)]
    ref = reference.attend(qkv, *given[0], Places(pos, cos, sin, table), heads)
    with calls() as made:
        y = cpu.attend(qkv, *given[1], Places(pos, cos, sin, table), heads)
        assert [call.what for call, *_ in made] == [cpu.ATTEND]
    assert close(y, ref, dtype)
    assert close(given[1][0], given[0][0], dtype)
    assert torch.equal(given[1][1], given[0][1])
    threads(3)
    assert torch.equal(cpu.attend(qkv, *given[2], Places(pos, cos, sin, table), heads), y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_so(isa, bad):
    x = torch.full((1, 32), bad)
    assert not cpu.add_norm(x, None, torch.ones(32), 1e-5).isfinite().any()
    gate = torch.cat([torch.tensor([[bad, -100.0, 100.0, -1e30]]), torch.ones(1, 4)], 1)
    y = cpu.gated(gate, "silu")
    assert torch.equal(y.isnan() | y.isinf(), torch.tensor([[True, False, False, False]]))
    assert y[0, 1:].tolist() == [0, 100, 0]


def test_unsupported_calls_go_to_the_definition():
    heads, dtype = Heads(2, 2, 24, 1.0), torch.float32  # 24 is not a whole number of registers
    qkv, cache = draw(1, 6 * 24, dtype=dtype), [torch.zeros(1, 2, 4, 24) for _ in range(2)]
    turned = [draw(4, 24, dtype=dtype) for _ in range(2)]
    y = cpu.attend(qkv, *cache, Places(torch.zeros(1, dtype=torch.int32), *turned), heads)
    assert torch.equal(y, qkv[:, 4 * 24 :])
    turned = [draw(4, 48, dtype=dtype) for _ in range(2)]  # wider than a head of 32: the library would write past its rows
    cache = [torch.zeros(1, 2, 4, 32) for _ in range(2)]
    with calls() as made, pytest.raises(RuntimeError):
        cpu.attend(
            draw(1, 6 * 32, dtype=dtype), *cache, Places(torch.zeros(1, dtype=torch.int32), *turned), Heads(2, 2, 32, 1.0)
        )
    with pytest.raises(RuntimeError):
        rows_cpu.prepare(draw(1, 6 * 32, dtype=dtype), Prepared(2, 2, 32), torch.zeros(1, dtype=torch.int32), *turned)
    assert not made
    wide = draw(2, 64, dtype=dtype)[:, ::2]
    assert torch.equal(cpu.gated(wide, "silu"), reference.gated(wide, "silu"))


def two_products(first, second, also=None):
    """A norm, a product, a gate and a product, as a layer has them; x (M, 64) -> (M, 48)."""
    scale = torch.ones(64, dtype=torch.bfloat16)

    def fn(x):
        y = cpu.add_norm(x, None, scale, 1e-5)
        y = cpu.gated(packed.packed(y, first, None, {}), "silu")
        return packed.packed(y if also is None else also(y), second, None, {})

    return fn


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_made_again_as_one_call_has_the_same_bits(isa, threads, number):
    threads(number)
    fn = two_products(pack(weight(128, 64, 4, 32), "cpu"), pack(weight(48, 64, 3, 32), "cpu"))
    again, inputs = partial(Repeated(), fn), [draw(2, 64, dtype=torch.bfloat16, seed=i) for i in range(4)]
    expected = [fn(x.clone()) for x in inputs]
    assert torch.equal(again(inputs[0]), expected[0])
    before = inputs[1].clone()
    with calls() as made:
        for x, y in zip(inputs[1:], expected[1:], strict=True):
            assert torch.equal(again(x), y)
        assert not made  # nothing goes through Python
    assert torch.equal(inputs[1], before)


def test_steps_with_torch_operations_are_called_every_time(isa):
    halved = two_products(pack(weight(128, 64, 4, 32), "cpu"), pack(weight(48, 64, 3, 32), "cpu"), lambda y: y / 2)
    again = partial(Repeated(), halved)
    for i in range(3):
        x = draw(2, 64, dtype=torch.bfloat16, seed=i)
        assert torch.equal(again(x), halved(x.clone()))
    assert getattr(native.noting, "calls", None) is None
