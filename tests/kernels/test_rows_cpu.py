"""What layers of other families than Llama's do between products on a CPU: rows_cpu.py's C++ against the definitions."""

from itertools import product

import pytest
import torch

from cpu_sets import isa, pytestmark
from lowq_kernels.decode import activation, norms, prepare, rows_cpu
from lowq_kernels.decode.norms import Addition, Norm
from lowq_kernels.decode.prepare import PositionScale, Prepared
from lowq_kernels.products.cpu import native

__all__ = ["isa", "pytestmark"]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}  # relative Frobenius error
D = 16


@pytest.fixture
def ran():
    """Names of the library's calls so far: that a result is the definition's does not show who computed it."""
    native.noting.calls = []
    yield lambda: [native.NAMES[call.what] for call, _, _ in native.noting.calls]
    native.noting.calls = None


def error(y, wanted):
    return float((y.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def norms_of(H, dtype):
    def weight():
        return torch.randn(H).to(dtype)

    yield Norm(weight(), 1e-5)
    yield Norm(None, 1e-2)
    yield Norm(weight(), 1e-5, "layer", weight())
    yield Norm(torch.randn(H), 1e-5, groups=3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("M", "H"), [(1, 96), (3, 72), (5, 513)])
def test_updates_and_norms(isa, ran, dtype, M, H):
    torch.manual_seed(M)
    every = [*norms_of(H, dtype)]
    for norm, post in product(every, [None, *every]):
        x, delta, second = (torch.randn(M, H).to(dtype) for _ in range(3))
        more = {"scale": 0.3, "after": torch.tensor([1.7]), "second": second} if post is norm else {}
        how = Addition(post, **more)
        ours, theirs = x.clone(), x.clone()
        y, expected = rows_cpu.update_norm(ours, delta, norm, how), norms.update_norm(theirs, delta, norm, how)
        assert error(y, expected) < TOLERANCE[dtype]
        assert error(ours, theirs) < TOLERANCE[dtype]
        assert error(rows_cpu.normed(x, norm), norms.normed(x, norm)) < TOLERANCE[dtype]
        ours, theirs = x.clone(), x.clone()
        rows_cpu.add(ours, delta, how)
        norms.add(theirs, delta, how)
        assert error(ours, theirs) < TOLERANCE[dtype]
    assert ran() == ["update"] * 60


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gates_of_outputs(isa, ran, dtype):
    y, gate = torch.randn(3, 300).to(dtype), torch.randn(3, 300).to(dtype)
    for some in (gate, gate[:, :1].contiguous()):
        assert error(rows_cpu.opened(y, some), activation.opened(y, some)) < TOLERANCE[dtype]
    assert ran() == ["open"] * 2


def facts(dtype):
    """Layouts of q, k, v with what is done to them: every value of every field, and every pair of values of the first seven."""
    values = product((2, 4), (False, True), (False, True), ("head", "all"), (False, True), ("halves", "neighbours"), (0, 8, 16))
    for i, (HKV, gated, v_is_k, over, last, pairing, R) in enumerate(values):
        writes, kind = i % 5 != 0, "layer" if i % 7 == 0 else "rms"

        def norm(n, kind=kind):
            return Norm(torch.randn(n).to(dtype), 1e-6, kind, torch.randn(n).to(dtype) if kind == "layer" else None)

        wide = (4 * D, HKV * D) if over == "all" else (D, D)
        q, k = map(norm, wide) if i % 3 else (None, None)
        v, scale = Norm(None, 1e-6) if i % 4 == 1 else None, PositionScale(0.1, 4, 1) if i % 4 == 2 else None
        yield Prepared(4, HKV, D, "parts", gated, v_is_k, writes, q, k, v, over, last, pairing, 0.7 if i % 2 else 1.0, scale), R
    yield Prepared(4, 4, D, "heads", q_norm=norm(D), k_norm=norm(D)), 16


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_queries_keys_and_values_before_attention(isa, ran, dtype):
    torch.manual_seed(2)
    cases = [*facts(dtype)]
    for p, R in cases:
        values = p.HKV * D * (1 if p.v_is_k else 2) if p.writes else 0
        N = 3 * p.HQ * D if p.order == "heads" else p.HQ * D * (2 if p.gated else 1) + values
        x, pos = torch.randn(3, N).to(dtype), torch.tensor([0, 5, 17], dtype=torch.int32)
        tables = [torch.randn(32, R).to(dtype) if R else None for _ in range(2)]
        (y, gate), (expected, wanted_gate) = rows_cpu.prepare(x, p, pos, *tables), prepare.prepare(x, p, pos, *tables)
        assert y.shape == expected.shape
        assert error(y, expected) < TOLERANCE[dtype], p
        assert gate is wanted_gate is None or torch.equal(gate, wanted_gate)
    assert ran() == ["prepare"] * len(cases)


def test_the_bits_depend_on_no_thread():
    torch.manual_seed(3)
    (p, R), norm, before = [*facts(torch.bfloat16)][3], Norm(torch.randn(64), 1e-5), torch.get_num_threads()
    x, qkv = (
        torch.randn(9, 64).bfloat16(),
        torch.randn(9, (4 * (1 + p.gated) + p.HKV * (2 - p.v_is_k) * p.writes) * D).bfloat16(),
    )
    pos, tables = torch.arange(9, dtype=torch.int32), [torch.randn(9, R) if R else None for _ in range(2)]
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rows = rows_cpu.update_norm(x.clone(), x, norm), rows_cpu.opened(x, x), rows_cpu.prepare(qkv, p, pos, *tables)[0]
            results.append(rows)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_unsupported_calls_are_computed_by_the_definition(ran):
    x, norm = torch.randn(4, 6, 8), Norm(torch.randn(8), 1e-5)
    assert torch.equal(rows_cpu.normed(x, norm), norms.normed(x, norm))
    rows, by_head = x[:, 0], norm._replace(weight=torch.randn(4, 8))
    assert torch.equal(rows_cpu.normed(rows, norm), norms.normed(rows, norm))
    whole = rows.contiguous()
    assert torch.equal(rows_cpu.normed(whole, by_head), norms.normed(whole, by_head))
    learnt = whole.requires_grad_()
    rows_cpu.normed(learnt, norm).sum().backward()
    assert learnt.grad is not None
    wide = whole.detach().double()
    assert torch.equal(rows_cpu.opened(wide, wide), activation.opened(wide, wide))
    assert ran() == []
