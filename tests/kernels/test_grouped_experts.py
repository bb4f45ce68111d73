"""Grouped products of a mixture: rows sorted by expert, tile_wgmma's grouped source emulated, the whole layer against fp32."""

from unittest import mock

import pytest
import torch

import emulation
from lowq_packers.layouts import pack
from lowq_packers.scheme import Scheme

emulation.require("cuda/tile_wgmma")
import simt
from lowq_kernels.decode import grouped_experts
from lowq_kernels.modules.stack import Stack
from lowq_kernels.products.cuda import tile_wgmma, tile_wgmma_grouped

CASES = [  # tokens, experts, experts a token, width, hidden, bits, group, zero, dtype, rows of a tile
    (5, 4, 2, 64, 128, 4, 32, "float", torch.float16, 16),
    (40, 3, 2, 80, 136, 3, 0, "int", torch.bfloat16, 32),
    (70, 3, 2, 64, 128, 2, 64, "none", torch.float16, 64),
    (140, 2, 1, 32, 64, 8, 32, "float", torch.bfloat16, 128),
    (60, 2, 2, 96, 128, 8, 32, "float", torch.float16, 128),
    (60, 2, 2, 96, 128, 3, 32, "float", torch.float16, 128),
]


@pytest.fixture(autouse=True)
def gpu():
    with emulation.hopper(tile_wgmma), emulation.sms(3):
        yield
    emulation.forget(tile_wgmma)


def stack(E, N, K, bits, group, zero, dtype):
    weights = [emulation.weight(N, K, bits, group, zero, dtype, torch.Generator().manual_seed(e)) for e in range(E)]
    packed = [pack(q, "tile") for q in weights]
    zeros = None if zero == "none" else torch.stack([p.zeros for p in packed])
    words, scales = (torch.stack([getattr(p, leaf) for p in packed]) for leaf in ("words", "scales"))
    return Stack(words, scales, zeros, None, Scheme(bits, group or K, zero), N, K, "tile"), weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer(case):
    T, E, top_k, width, H, bits, group, zero, dtype, rows = case
    up, of_up = stack(E, 2 * width, H, bits, group, zero, dtype)
    down, of_down = stack(E, H, width, bits, 16 if width % (group or 16) else group, zero, dtype)
    g = torch.Generator().manual_seed(T)
    x = torch.randn(T, H, generator=g).to(dtype)
    ids = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(T)])
    weights = torch.rand(T, top_k, generator=g)
    assert tile_wgmma_grouped.block(rows * E if rows > 64 else T * top_k, E) in tile_wgmma_grouped.CONFIGS
    found = []
    for order in (1, -1)[: 1 if rows > 32 else 2]:
        with mock.patch.object(simt.Kernel, "order", order), mock.patch.object(tile_wgmma_grouped, "block", return_value=rows):
            found.append(grouped_experts.grouped_experts(x, ids, weights, up, down, "silu"))
    assert torch.equal(found[0], found[-1]), "the order of the threads changes the result"
    wanted = torch.zeros(T, H)
    for t in range(T):
        for w, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, value = (x[t].float() @ of_up[e].dequantize().float().T).chunk(2)
            wanted[t] += w * ((torch.nn.functional.silu(gate) * value) @ of_down[e].dequantize().float().T)
    error = float((found[0].float() - wanted).norm() / wanted.norm())
    assert error < {torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]


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
