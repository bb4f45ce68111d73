"""Low-rank additions in the kernels of norms and gates, compared with the definitions in fp64."""

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


def tensors(M, K, dtype, like):
    g = torch.Generator().manual_seed(3)
    return (t.to(like.device, dtype) for t in (torch.randn(M, K, generator=g), 1 + torch.randn(K, generator=g) / 4))


def normed(x, weight, eps=1e-3):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_a_norm_and_what_its_product_adds(shape, dtype, first, poisoned):
    from lowq_kernels.decode.low_rank_folded import norm_shrink
    from lowq_kernels.decode.low_rank_triton import expand_rows

    x, factors, rows = made(*shape, dtype)
    delta, weight = tensors(*x.shape, dtype, x)
    before = x.clone()
    new, y, shrunk = norm_shrink(x, None if first else delta, weight, 1e-3, factors, rows)
    assert torch.equal(x, before)
    assert torch.equal(new, x if first else (x.float() + delta.float()).to(dtype))
    truth = normed(new, weight)
    assert error(y, truth) < ERROR[dtype]
    z = torch.ones(len(x), factors.ends[-1], dtype=dtype, device=x.device)
    output = expand_rows(z.clone(), shrunk, factors, rows)
    assert error(output, 1 + added(truth, factors, rows)) < ERROR[dtype]
    assert torch.equal(output[rows == 0], z[rows == 0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_a_gate_between_two_products_with_adapters(shape, dtype, act, poisoned):
    """Gate and up of one part or two; the next product has another rank."""
    from lowq_kernels.decode.low_rank_folded import gate_shrink, norm_shrink, takes_gate
    from lowq_kernels.decode.low_rank_triton import expand_rows, room, shrink_rows

    M, K, parts, S, R = shape
    parts = (parts[0], parts[0]) if len(parts) > 1 else parts
    x, up, rows = made(M, K, parts, S, R, dtype)
    width = up.ends[-1] // 2
    _, down, _ = made(M, width, (24,), S, 16 if R > 16 else 32, dtype, seed=1)
    assert takes_gate(up, down, act)
    _, weight = tensors(M, K, dtype, x)
    _, _, shrunk = norm_shrink(x, None, weight, 1e-3, up, rows)
    z = torch.randn(M, 2 * width, generator=torch.Generator().manual_seed(5)).to(x.device, dtype)
    h, behind = gate_shrink(z, shrunk, up, down, act, 0.5, rows)
    gate, of_up = (z.double() + added(normed(x, weight), up, rows)).chunk(2, 1)
    gate = F.silu(0.5 * gate) if act == "silu" else F.gelu(0.5 * gate, approximate="tanh")
    assert error(h, gate * of_up) < 2 * ERROR[dtype]
    out = expand_rows(torch.ones(M, 24, dtype=dtype, device=x.device), behind, down, rows)
    assert error(out, 1 + added(h, down, rows)) < ERROR[dtype]
    y = normed(x, weight).to(dtype)
    alone, nothing = gate_shrink(z, shrink_rows(y, up, rows, room(y, up)), up, None, act, 0.5, rows)
    assert error(alone, gate * of_up) < 2 * ERROR[dtype]
    assert nothing is None
    other = LowRank.of(up.A, up.B + 1, up.ends)
    assert error(gate_shrink(z, shrunk, other, down, act, 0.5, rows)[0], gate * of_up) > 2 * ERROR[dtype]


def test_what_the_gate_does_not_take():
    from lowq_kernels.decode.low_rank_folded import takes_gate

    _, up, _ = made(2, 32, (16, 16), 2, 16, torch.float32)
    _, down, _ = made(2, 16, (24,), 2, 16, torch.float32)
    _, uneven, _ = made(2, 32, (20, 12), 2, 16, torch.float32)
    assert takes_gate(up, down, "silu")
    assert not takes_gate(up, down, "clamped_swiglu")
    assert not takes_gate(uneven, down, "silu")
    assert not takes_gate(up, up, "silu")


def test_a_row_has_the_same_bits_beside_any_other_rows():
    """Programs of several rows read the factors of neighbours with one adapter once."""
    from lowq_kernels.decode.low_rank_folded import gate_shrink, norm_shrink
    from lowq_kernels.decode.low_rank_triton import add_low_rank_rows, expand_rows

    x, up, _ = made(20, 70, (40, 40), 4, 16, torch.float16)
    _, down, _ = made(20, 40, (24,), 4, 16, torch.float16, seed=1)
    _, weight = tensors(20, 70, torch.float16, x)

    def outputs(adapters):
        rows = torch.tensor(adapters, dtype=torch.int32, device=x.device)
        _, _, shrunk = norm_shrink(x, None, weight, 1e-3, up, rows)
        h, behind = gate_shrink(torch.ones(20, 80, dtype=x.dtype, device=x.device), shrunk, up, down, "silu", 1.0, rows)
        out = expand_rows(torch.zeros(20, 24, dtype=x.dtype, device=x.device), behind, down, rows)
        alone = add_low_rank_rows(torch.zeros(20, 80, dtype=x.dtype, device=x.device), x, up, rows)
        return torch.cat([h, out, alone], 1)[3]

    expected = outputs([2] * 20)
    assert torch.equal(outputs([1, 1, 3, 2] * 5), expected)
    assert torch.equal(outputs([0, 0, 0, 2] + [0] * 16), expected)
    assert not torch.equal(outputs([2, 2, 2, 1] + [2] * 16), expected)
