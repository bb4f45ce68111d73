"""Triton's interpreter as the tests run it (tests/emulator/interpreter.py): it refuses and restores what Triton's own does."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

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


def test_after_a_launch_the_language_is_triton_s_again():
    before = {name: getattr(tl, name) for name in ("load", "store", "arange")}
    x = torch.ones(4)
    _kernel[(1,)](x, x.clone(), "add")
    assert x.tolist() == [2] * 4
    assert {name: getattr(tl, name) for name in before} == before
    with pytest.raises(ValueError, match="outside of JIT"):
        tl.arange(0, 4)
