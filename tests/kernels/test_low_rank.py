"""Low-rank additions: the definition compared with dense weights, the Triton kernels compared with the definition."""

import pytest
import torch

from lowq_kernels.decode.low_rank import add_low_rank
from lowq_kernels.decode.low_rank_factors import LowRank

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}


def made(M, K, parts, S, R, dtype, device="cpu"):
    ends = torch.tensor(parts).cumsum(0).tolist()
    N = ends[-1]
    g = torch.Generator().manual_seed(M * K + N)
    x, y = torch.randn(M, K, generator=g), torch.randn(M, N, generator=g)
    A, B = torch.randn(S, len(parts), R, K, generator=g) / K**0.5, torch.randn(S, N, R, generator=g)
    A[0], B[0] = float("nan"), float("nan")  # never read
    rows = torch.randint(0, S, (M,), generator=g, dtype=torch.int32)
    rows[-1] = S - 1
    x, y, A, B = (t.to(device, dtype) for t in (x, y, A, B))
    return x, y, LowRank.of(A, B, tuple(ends)), rows.to(device)


def dense(x, y, factors, rows):
    """Row by row, as if each adapter were a dense weight, in fp64."""
    out = y.double().clone()
    for m, a in enumerate(rows.tolist()):
        first = 0
        for p, end in enumerate(factors.ends):
            if a:
                out[m, first:end] += factors.B[a, first:end].double() @ (factors.A[a, p].double() @ x[m].double())
            first = end
    return out


def error(output, truth):
    return float((output.double() - truth).norm() / truth.norm())


SHAPES = [  # rows, columns of x, columns of each part of y, adapters with number 0, rank
    (1, 32, (48,), 2, 16), (7, 100, (33, 5), 5, 16), (16, 64, (128, 130), 17, 16), (9, 2100, (17,), 2, 16),
    (33, 64, (20, 9), 9, 64), (130, 80, (129, 1), 9, 16), (129, 150, (40, 30), 5, 64),
]  # fmt: skip
LARGE = [(1, 4096, (4096, 1024, 1024), 9, 16), (16, 14336, (4096,), 9, 16), (300, 4096, (4096,), 33, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_definition_is_a_dense_weight_a_row(shape, dtype):
    x, y, factors, rows = made(*shape, dtype)
    assert error(add_low_rank(y.clone(), x, factors, rows), dense(x, y, factors, rows)) < TOLERANCE[dtype]
    assert torch.equal(add_low_rank(y.clone(), x, factors, torch.zeros_like(rows)), y)


def kernels(shape, dtype, device):
    triton = pytest.importorskip("lowq_kernels.decode.low_rank_triton", reason="needs triton")
    x, y, factors, rows = made(*shape, dtype, device)
    truth = dense(x, y, factors, rows)
    output = triton.add_low_rank_rows(y.clone(), x, factors, rows)
    assert error(output, truth) < TOLERANCE[dtype]
    assert torch.equal(output[rows == 0], y[rows == 0])
    changed = factors.B.clone()
    changed[int(rows.max())] += 1
    other = LowRank.of(factors.A, changed, factors.ends)
    assert error(triton.add_low_rank_rows(y.clone(), x, other, rows), truth) > TOLERANCE[dtype]
    others = torch.where(torch.arange(len(rows), device=device) % 2 == 1, rows.max(), rows)  # of every second row
    assert torch.equal(triton.add_low_rank_rows(y.clone(), x, factors, others)[::2], output[::2])
    again = triton.add_low_rank_rows(y.clone(), x, factors, rows, triton.room(x, factors))
    assert torch.equal(again, output)
    wide = torch.cat([y, y], 1)[:, : y.shape[1]]  # rows further apart than they are long; the same bits again
    assert torch.equal(triton.add_low_rank_rows(wide, torch.cat([x, x], 1)[:, : x.shape[1]], factors, rows), output)


@pytest.mark.parametrize(("shape", "dtype"), [(s, torch.float16) for s in SHAPES] + [(SHAPES[1], torch.float32)], ids=str)
def test_the_kernels_are_the_definition(shape, dtype):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU; the test below runs there")
    kernels(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_kernels_are_the_definition_on_a_gpu(shape, dtype):
    kernels(shape, dtype, "cuda")
