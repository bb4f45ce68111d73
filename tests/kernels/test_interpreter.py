"""Triton's interpreter as the tests run it (tests/emulator/interpreter.py): it refuses what Triton's own does in debug mode."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

if not torch.cuda.is_available():
    import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
LIMITS = {torch.int8: (-128, 127), torch.int16: (-(2**15), 2**15 - 1), torch.int32: (-(2**31), 2**31 - 1)}


@triton.jit
def _combined(x, y, KIND: tl.constexpr):
    if KIND == "add":
        z = x + y
    elif KIND == "sub":
        z = x - y
    else:
        z = x * y
    return z


@triton.jit
def _kernel(x_ptr, y_ptr, KIND: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(x_ptr + at, _combined(tl.load(x_ptr + at), tl.load(y_ptr + at), KIND))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", ["add", "sub", "mul"])
def test_integers_that_overflow_are_refused(kind, dtype):
    low, high = LIMITS[dtype]
    for end, step in ((high, 1), (low, -1)):
        x, y = torch.tensor([0, 1, 2, end], dtype=dtype), torch.tensor([0, 1, 2, 0 if kind != "mul" else 1], dtype=dtype)
        expected = {"add": x + y, "sub": x - y, "mul": x * y}[kind]
        _kernel[(1,)](x, y, kind)
        assert torch.equal(x, expected)
        x[3], y[3] = end, {"add": step, "sub": -step, "mul": 2}[kind]
        with pytest.raises(Exception, match=f"overflow detected for operation {kind}"):
            _kernel[(1,)](x, y, kind)


def outcome(kind, x, y):
    """x after the kernel, or None where it was refused."""
    x = x.clone()
    try:
        _kernel[(1,)](x, y, kind)
    except triton.runtime.errors.InterpreterError as e:
        if "AssertionError" not in str(e):
            raise
        return None
    return x.tolist()


@pytest.mark.parametrize("dtype", [*LIMITS, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["add", "sub", "mul"])
def test_results_are_those_of_tritons_interpreter_and_refusals_those_of_its_debug_mode(kind, dtype):
    info, refused = torch.iinfo(dtype), 0
    edges = [v for v in (info.min, -1, 1, 2, info.max) if v >= info.min]
    for a, b in itertools.product(edges, edges):
        x, y = torch.tensor([0, 0, 1, a], dtype=dtype), torch.tensor([0, 0, 1, b], dtype=dtype)
        ours = outcome(kind, x, y)
        with interpreter.unpatched(debug=True):
            assert ours == outcome(kind, x, y), (a, b)
        with interpreter.unpatched():
            result = outcome(kind, x, y)
        assert result is not None
        assert ours in (result, None)
        refused += ours is None
    assert (refused > 0) == (dtype != torch.int64)  # 64 bits are not checked, by either


def test_our_two_steps_are_those_that_run():
    """Triton looks them up by names of its own. After a renaming ours would be left unused."""
    x, used = torch.tensor([0, 0, 0, 127], dtype=torch.int8), interpreter.builtins_of.cache_info()
    assert outcome("add", x, torch.ones_like(x)) is None  # Triton's, not in debug mode, takes it: the test above
    now = interpreter.builtins_of.cache_info()
    assert now.hits + now.misses > used.hits + used.misses


def test_after_a_launch_the_language_is_triton_s_again():
    before = {name: getattr(tl, name) for name in ("load", "store", "arange")}
    x = torch.ones(4)
    _kernel[(1,)](x, x.clone(), "add")
    assert x.tolist() == [2] * 4
    assert {name: getattr(tl, name) for name in before} == before
    with pytest.raises(ValueError, match="outside of JIT"):
        tl.arange(0, 4)


@triton.jit
def _of_all_kinds(x_ptr, n_ptr, y_ptr, m, DTYPE: tl.constexpr):
    """Blocks with blocks of other shapes, with scalars and constants, of other types, in most operations."""
    at = tl.arange(0, 8)
    x, n = tl.load(x_ptr + at), tl.load(n_ptr + at, mask=at < 7, other=3)
    first, rows, columns = tl.load(x_ptr), x[:, None], (x * 2 + m)[None, :]
    y = (
        (rows + columns) * 0.37
        - first / (columns + 9)
        + tl.where(rows < columns, rows, -1.5)
        + tl.where(n[None, :] > m, 0, rows)
    )
    y += (
        (rows.to(DTYPE) / columns.to(DTYPE)).to(tl.float32)
        + columns.to(DTYPE).to(tl.float32)
        + x.to(tl.float16).to(DTYPE) * rows.to(DTYPE)
    )
    y += (
        ((n // 3 << 2 | 1) ^ n % 5)[:, None]
        + (n.to(tl.uint32) >> 1)[None, :].to(tl.int32)
        + (-n >> 1)[:, None]
        + (7 - n & m)[:, None]
    )
    y += tl.maximum(rows, 0.25) + tl.minimum(x, columns) + tl.clamp(columns, -1.0, 1.0) + tl.math.fma(rows, columns, 0.5)
    y += tl.sum(y, 1)[:, None] + tl.max(tl.trans(y), 1) + tl.cumsum(x, 0) + tl.full((8, 1), 2, tl.float16) + tl.dot(y, y)
    y = tl.where(m > 1, y, first) + tl.where(m > 9, 1.0, y) + tl.broadcast_to(first, (8, 8)) + tl.zeros((1, 8), tl.float32)
    tl.store(y_ptr + at[:, None] * 8 + at[None, :], y, mask=(at[:, None] < m) | (at == 7)[None, :])
    tl.store(y_ptr + 64 + at, n.to(tl.float32) + at, mask=at != 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_operations_of_all_kinds_give_tritons_bits(dtype):
    g = torch.Generator().manual_seed(1)
    x, n = torch.randn(8, generator=g), torch.randint(0, 99, (8,), generator=g, dtype=torch.int32)
    ours, theirs = torch.full((72,), float("nan")), torch.full((72,), float("nan"))
    _of_all_kinds[(1,)](x, n, ours, 5, getattr(tl, dtype))
    with interpreter.unpatched():
        _of_all_kinds[(1,)](x, n, theirs, 5, getattr(tl, dtype))
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert ours.isnan().sum() == 22
