"""What tests of own C++ on the CPU share: each instruction set that is here, and rows of x."""

from contextlib import contextmanager

import pytest
import torch

from lowq_kernels.products.cpu import native

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ROWS = (1, 2, 3, 5, 8, 9, 15, 16, 19)  # M: every block of rows and what is left over
SETS = [name for name, here in native.sets() if here]


pytestmark = pytest.mark.skipif(native.library() is None, reason=f"own CPU kernels are not built: {native.why_not()}")


def rows(M, K, dtype=torch.bfloat16, seed=0):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def only(name, monkeypatch):
    """One instruction set."""
    monkeypatch.setenv("LOWQ_CPU_ISA", name)
    native.forget()
    yield name
    native.forget()


@pytest.fixture(params=SETS)
def plain_isa(request, monkeypatch):
    """One instruction set after the other."""
    with only(request.param, monkeypatch) as name:
        yield name


@pytest.fixture(params=SETS)
def isa(request, monkeypatch):
    """One instruction set after the other, and outputs that hold NaN, or large integers, until they are written."""

    def poisoned(*size, **kind):
        dtype = kind.get("dtype", torch.float32)
        poison = float("nan") if dtype.is_floating_point else 0x5A5A5A5A & torch.iinfo(dtype).max
        return torch.full(size if isinstance(size[0], int) else size[0], poison, **kind)

    with only(request.param, monkeypatch) as name:
        monkeypatch.setattr(torch, "empty", poisoned)
        yield name
