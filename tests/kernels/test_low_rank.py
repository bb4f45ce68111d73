"""Low-rank additions: the definition compared with dense weights, the Triton kernels compared with the definition."""

import pytest
import torch

from lowq_kernels.decode.low_rank import add_low_rank

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}


def made(M, K, N, S, R, dtype, device="cpu"):
    g = torch.Generator().manual_seed(M * K + N)
    x, y = torch.randn(M, K, generator=g), torch.randn(M, N, generator=g)
    A, B = torch.randn(S, R, K, generator=g) / K**0.5, torch.randn(S, N, R, generator=g)
    A[0], B[0] = float("nan"), float("nan")  # never read
    rows = torch.randint(0, S, (M,), generator=g, dtype=torch.int32)
    return [t.to(device, dtype) for t in (x, y, A, B)] + [rows.to(device)]


def dense(x, y, A, B, rows):
    """Row by row, as if each adapter were a dense weight, in fp64."""
    out = y.double().clone()
    for m, a in enumerate(rows.tolist()):
        if a:
            out[m] += B[a].double() @ (A[a].double() @ x[m].double())
    return out


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


SHAPES = [(1, 32, 48, 2, 16), (7, 100, 33, 5, 16), (16, 64, 128, 33, 16), (40, 1100, 70, 3, 32), (33, 64, 64, 9, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_definition_is_a_dense_weight_a_row(shape, dtype):
    x, y, A, B, rows = made(*shape, dtype)
    wanted = dense(x, y, A, B, rows)
    assert error(add_low_rank(y.clone(), x, A, B, rows), wanted) < TOLERANCE[dtype]
    assert torch.equal(add_low_rank(y.clone(), x, A, B, torch.zeros_like(rows)), y)


def kernels(shape, dtype, device):
    triton = pytest.importorskip("lowq_kernels.decode.low_rank_triton", reason="needs triton")
    x, y, A, B, rows = made(*shape, dtype, device)
    wanted = dense(x, y, A, B, rows)
    found = triton.add_low_rank_rows(y.clone(), x, A, B, rows)
    assert error(found, wanted) < TOLERANCE[dtype]
    assert torch.equal(found, triton.add_low_rank_rows(y.clone(), x, A, B, rows))
    assert torch.equal(found[rows == 0], y[rows == 0])
    changed = B.clone()
    changed[int(rows.max())] += 1
    assert error(triton.add_low_rank_rows(y.clone(), x, A, changed, rows), wanted) > TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_kernels_are_the_definition(shape, dtype):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; the test below runs there")
    kernels(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096, 6144, 9, 16), (300, 4096, 4096, 33, 16)], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_kernels_are_the_definition_on_a_gpu(shape, dtype):
    kernels(shape, dtype, "cuda")
