"""Low-rank additions in the gate's kernel, compared with the definition in fp64."""

import pytest
import torch
from torch.nn import functional as F

from lowq_kernels.decode.low_rank_factors import LowRank

ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    pytest.importorskip("triton", reason="needs triton")
DTYPES = list(ERROR) if ON_GPU else [torch.float16, torch.float32]
SHAPES = [  # rows, columns of x, columns of each part, adapters with number 0, rank
    (1, 64, (48,), 2, 16), (5, 100, (32, 32, 40), 4, 16), (9, 2112, (20, 20), 6, 32), (17, 80, (96,), 3, 64),
    (70, 36, (6, 6), 5, 16), (20, 100, (100, 100), 2, 256),
]  # fmt: skip


def made(M, K, parts, S, R, dtype, seed=0):
    """x (M, K), the factors of random adapters and each row's adapter: of several, of none, in runs from row 32 on."""
    g = torch.Generator().manual_seed(M * K + seed)
    A, B = torch.randn(S, len(parts), R, K, generator=g) / K**0.5, torch.randn(S, sum(parts), R, generator=g) / R**0.5
    A[0], B[0] = float("nan"), float("nan")  # never read
    rows = torch.randint(0, S, (M,), generator=g, dtype=torch.int32)
    rows[32:] = torch.where(rows > 0, 1 + torch.arange(M) // 6 % (S - 1), 0)[32:]
    rows[-1] = S - 1
    device = "cuda" if ON_GPU else "cpu"
    x, A, B = (t.to(device, dtype) for t in (torch.randn(M, K, generator=g), A, B))
    return x, LowRank.of(A, B, tuple(torch.tensor(parts).cumsum(0).tolist())), rows.to(device)


def added(x, factors, rows):
    """What adapters add to a product of x, row by row, in fp64."""
    out = torch.zeros(len(x), factors.ends[-1], dtype=torch.float64, device=x.device)
    for m, a in enumerate(rows.tolist()):
        first = 0
        for p, end in enumerate(factors.ends):
            if a:
                out[m, first:end] = factors.B[a, first:end].double() @ (factors.A[a, p].double() @ x[m].double())
            first = end
    return out


def error(output, truth):
    return float((output.double() - truth).norm() / truth.norm())


@pytest.fixture
def poisoned(monkeypatch):
    """Outputs that begin as NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, **how: make(*a, **how).fill_(float("nan")))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_a_gate_behind_a_product_with_adapters(shape, dtype, act, poisoned):
    """Gate and up of one part or two."""
    from lowq_kernels.decode.low_rank_gate import gate_rows, takes_gate
    from lowq_kernels.decode.low_rank_triton import room, shrink_rows

    M, K, parts, S, R = shape
    x, up, rows = made(M, K, (parts[0], parts[0]) if len(parts) > 1 else parts, S, R, dtype)
    assert takes_gate(up, act)
    z = torch.randn(M, up.ends[-1], generator=torch.Generator().manual_seed(5)).to(x.device, dtype)
    shrunk = shrink_rows(x, up, rows, room(x, up))
    h = gate_rows(z, shrunk, up, act, 0.5, rows)
    gate, of_up = (z.double() + added(x, up, rows)).chunk(2, 1)
    gate = F.silu(0.5 * gate) if act == "silu" else F.gelu(0.5 * gate, approximate="tanh")
    assert error(h, gate * of_up) < 2 * ERROR[dtype]
    other = LowRank.of(up.A, up.B + 1, up.ends)
    assert error(gate_rows(z, shrunk, other, act, 0.5, rows), gate * of_up) > 2 * ERROR[dtype]


def test_what_the_gate_does_not_take():
    from lowq_kernels.decode.low_rank_gate import takes_gate

    _, up, _ = made(2, 32, (16, 16), 2, 16, torch.float32)
    _, uneven, _ = made(2, 32, (20, 12), 2, 16, torch.float32)
    _, three, _ = made(2, 32, (12, 10, 10), 2, 16, torch.float32)
    assert takes_gate(up, "silu")
    assert not takes_gate(up, "clamped_swiglu")
    assert not takes_gate(uneven, "silu")
    assert not takes_gate(three, "silu")


def test_a_row_has_the_same_bits_beside_any_other_rows():
    """Programs of several rows read the factors of neighbours with one adapter once."""
    from lowq_kernels.decode.low_rank_gate import gate_rows
    from lowq_kernels.decode.low_rank_triton import add_low_rank_rows, shrink_rows

    x, up, _ = made(20, 70, (40, 40), 4, 16, torch.float16)

    def outputs(adapters):
        rows = torch.tensor(adapters, dtype=torch.int32, device=x.device)
        ones = torch.ones(20, 80, dtype=x.dtype, device=x.device)
        h = gate_rows(ones, shrink_rows(x, up, rows), up, "silu", 1.0, rows)
        return torch.cat([h, add_low_rank_rows(torch.zeros_like(ones), x, up, rows)], 1)[3]

    expected = outputs([2] * 20)
    assert torch.equal(outputs([1, 1, 3, 2] * 5), expected)
    assert torch.equal(outputs([0, 0, 0, 2] + [0] * 16), expected)
    assert not torch.equal(outputs([2, 2, 2, 1] + [2] * 16), expected)
