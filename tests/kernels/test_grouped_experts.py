"""Grouped products of a mixture: rows sorted by expert, tile_wgmma's grouped source emulated, the whole layer against fp32."""

import inspect
from unittest import mock

import pytest
import torch

import emulation

emulation.require("cuda/tile_wgmma")
if torch.cuda.is_available():
    pytest.skip(
        "its Triton kernels run on a CPU, in the interpreter; benchmarks/experts_speed.py checks a GPU's",
        allow_module_level=True,
    )
import experts_speed

import simt
from lowq_kernels.decode import activation, experts, grouped_experts, reference
from lowq_kernels.products.cuda import tile_wgmma, tile_wgmma_grouped

CASES = [  # tokens, experts, experts a token, width, hidden, bits, group, zero, dtype, rows of a tile
    (5, 4, 2, 64, 128, 4, 32, "float", torch.float16, 16),
    (40, 3, 2, 80, 136, 3, 0, "int", torch.bfloat16, 32),
    (70, 3, 2, 64, 128, 2, 64, "none", torch.float16, 64),
    (140, 2, 1, 32, 64, 8, 32, "float", torch.bfloat16, 128),
    (9, 4, 2, 48, 96, 4, 32, "e2m1/e8m0", torch.bfloat16, 16),
    (40, 3, 2, 32, 112, 4, 16, "e2m1/e4m3", torch.float16, 32),
    (70, 2, 1, 32, 64, 4, 32, "fitted", torch.float16, 64),
    (7, 5, 2, 64, 128, 4, 32, "float", torch.bfloat16, 16, "ungated relu2"),
    (7, 5, 2, 96, 512, 4, 64, "none", torch.float16, 8),
    (9, 5, 2, 96, 544, 4, 32, "float", torch.bfloat16, 8),
]


ONE_BY_ONE = [CASES[0], CASES[4], CASES[5], (2, 4, 2, 48, 96, 4, 32, "e2m1/e8m0", torch.float16, 0)]


@pytest.fixture(autouse=True, scope="module")
def gpu():
    """Launchers see a small Hopper GPU behind CPU tensors; one run of g++ for each source builds the instances of all cases."""
    with emulation.hopper(tile_wgmma, experts), emulation.sms(3):
        with emulation.built_at_once():
            for case in CASES:
                grouped(case)
            for case in ONE_BY_ONE:
                experts.experts(*one_by_one(case)[0])
        yield


def made(case):
    """(arguments of a layer, what it is to be in fp32)."""
    T, E, top_k, width, H, bits, group, zero, dtype, _, *acts = case
    act = acts[0] if acts else "clamped_swiglu" if zero == "e2m1/e8m0" else "silu"
    up, of_up = emulation.stack(E, width if acts else 2 * width, H, bits, group, zero, dtype, tables=2)
    down, of_down = emulation.stack(E, H, width, bits, 16 if width % (group or 16) else group, zero, dtype)
    g = torch.Generator().manual_seed(T)
    x = torch.randn(T, H, generator=g).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(T)])
    weights, wanted = torch.rand(T, top_k, generator=g), torch.zeros(T, H)
    for t in range(T):
        for w, e in zip(weights[t], ids[t].tolist(), strict=True):
            both = x[t].float() @ of_up[e].T + (0 if up.bias is None else up.bias[e].float())
            h = activation.activated(both, act.removeprefix("ungated ")) if acts else reference.gated(both, act)
            y = h @ of_down[e].T
            wanted[t] += w * (y + (0 if down.bias is None else down.bias[e].float()))
    return (x, ids, weights, up, down, act, {}), wanted


def grouped(case, order=1):
    """(a layer by grouped products, with the emulator's threads in this order; what it is to be in fp32)."""
    layer, wanted = made(case)
    with mock.patch.object(simt.Kernel, "order", order), mock.patch.object(tile_wgmma_grouped, "block", return_value=case[9]):
        return grouped_experts.grouped_experts(*layer), wanted


@pytest.mark.parametrize("case", emulation.sampled(CASES, 3), ids=str)
def test_a_layer(case):
    (T, E, top_k), bits, (dtype, rows) = case[:3], case[5], case[8:10]
    assert tile_wgmma_grouped.block(rows * E if rows > 64 else T * top_k, E, bits) in tile_wgmma_grouped.CONFIGS
    y, wanted = grouped(case)
    if rows <= 32:
        assert torch.equal(y, grouped(case, -1)[0]), "the order of the threads changes the result"
        with mock.patch.object(grouped_experts, "MOST_SORTED", 0):  # counted, placed and gathered
            assert torch.equal(y, grouped(case)[0])
    assert emulation.error(y, wanted) < {torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


def one_by_one(case):
    return made((2, *case[1:]))


@pytest.mark.parametrize("case", ONE_BY_ONE, ids=str)
def test_a_layer_one_by_one(case):
    """By experts.cu, whose tokens read their own experts: values by scales as halves, and sums by scales."""
    layer, wanted = one_by_one(case)
    y = emulation.twice(lambda: experts.experts(*layer))
    assert emulation.error(y, wanted) < {torch.float16: 3e-3, torch.bfloat16: 2e-2}[case[8]]


@pytest.mark.parametrize(("T", "E", "top_k", "rows"), [(1, 8, 2, 16), (33, 5, 3, 16), (200, 128, 8, 32)])
def test_places(T, E, top_k, rows):
    g = torch.Generator().manual_seed(T)
    ids = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(T)])
    row, tokens, of_tile, valid = grouped_experts.place(ids, E, rows)
    assert len(set(row.tolist())) == T * top_k
    assert row.max() < valid.item() <= tokens.shape[0]
    assert torch.equal(tokens[row.long()], torch.arange(T * top_k, dtype=torch.int32) // top_k + 1)
    assert torch.equal(of_tile[row.long() // rows].long(), ids.reshape(-1)), "a slot's tile is its expert's"
    assert int((tokens > 0).sum()) == T * top_k


@pytest.mark.parametrize(("T", "E", "top_k", "rows", "H"), [(1, 8, 2, 16, 24), (33, 5, 3, 16, 1100), (100, 128, 8, 32, 40)])
def test_sorts(T, E, top_k, rows, H):
    """Each slot's token in a row of its own, an expert's rows in tiles that are its own, in the order of the tokens."""
    g = torch.Generator().manual_seed(T)
    ids, x = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(T)]), torch.randn(T, H, generator=g)
    y, row, of_tile, valid = grouped_experts.sort(x, ids, E, rows)
    at = row.long()
    assert len(set(row.tolist())) == T * top_k
    assert row.max() < valid.item() <= y.shape[0] == of_tile.shape[0] * rows
    assert valid.item() == rows * sum(-(-n // rows) for n in ids.flatten().bincount().tolist())
    assert torch.equal(y[at], x.repeat_interleave(top_k, 0))
    assert torch.equal(of_tile[at // rows].long(), ids.flatten()), "a slot's tile is its expert's"
    for e in ids.unique():
        assert (at[ids.flatten() == e].diff() == 1).all()


@pytest.mark.parametrize("way", experts_speed.WAYS)
def test_the_benchmark_calls_kernels_by_their_signatures(way):
    inspect.signature(experts_speed.WAYS[way]).bind(*["x", "ids", "weights", "gate_up", "down", "act"])
