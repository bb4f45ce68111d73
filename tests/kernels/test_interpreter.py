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
