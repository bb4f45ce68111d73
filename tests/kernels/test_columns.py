"""gptq's inner loop in Triton against torch's, interpreted on the CPU, compiled where a GPU is."""

import pytest
import torch

pytest.importorskip("triton")

from lowq_kernels.gptq.round_block import round_block_torch
from lowq_kernels.gptq.round_block_triton import round_block_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(R, B, levels, seed=0):
    """A block between other columns, the upper factor of inverse moments, and a grid a little narrower than the weights."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.randn(R, B + 9, generator=g)
    x = torch.randn(4 * B, B, generator=g) * torch.linspace(0.5, 2, B)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(x.T @ x)), upper=True)
    grids = torch.rand(2, R, 3, generator=g)
    scales = 3.5 / (levels - 1) * (0.8 + 0.4 * grids[0])
    zeros = (levels - 1) / 2 + grids[1]
    whole, factor, scales, zeros = (t.to(DEVICE) for t in (whole, factor, scales, zeros))
    return whole[:, 3 : 3 + B], factor, scales[:, 1], zeros[:, 1], levels


@pytest.mark.parametrize("B", [16, 48, 128])
@pytest.mark.parametrize("levels", [2, 8, 256])
def test_a_block_as_torch_rounds_it(B, levels):
    args = case(21, B, levels)
    before = args[0].clone()
    codes, errors = round_block_triton(*args)
    expected, wanted_errors = round_block_torch(*args)
    assert torch.equal(args[0], before)
    # a code that falls the other way by fp32 rounding moves every later one of its row
    same = (codes == expected).all(1)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(errors[same], wanted_errors[same], rtol=1e-4, atol=1e-4)
    assert (codes.amin(), codes.amax()) == (0, levels - 1)


def test_halves_go_to_the_even_code():
    block = torch.tensor([[0.5, 1.5, 2.5, -0.5] * 4], device=DEVICE)
    one, eye = torch.ones(1, device=DEVICE), torch.eye(16, device=DEVICE)
    codes, _ = round_block_triton(block, eye, one, torch.zeros_like(one), 256)
    assert codes[0, :4].tolist() == [0.0, 2.0, 2.0, 0.0]


def test_errors_are_moved_on():
    """Without the later columns' share the rows' outputs are further from what they were."""
    block, factor, scales, zeros, levels = case(40, 64, 4)
    codes, _ = round_block_triton(block, factor, scales, zeros, levels)
    alone, _ = round_block_triton(block, factor.diagonal().diag(), scales, zeros, levels)
    second = torch.cholesky_inverse(factor, upper=True)

    def loss(q):
        E = (q - zeros[:, None]) * scales[:, None] - block
        return float(((E @ second) * E).sum())

    assert loss(codes) < loss(alone)


def test_two_runs_are_the_same():
    args = case(64, 128, 8)
    first, second = round_block_triton(*args), round_block_triton(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
