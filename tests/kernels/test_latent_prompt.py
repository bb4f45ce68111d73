"""Triton's prompts of latent attention against their definition, over static and paged caches whose other slots are NaN."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from latents import DEVICE, DTYPES, FACTS, SHAPES, facts, randn

from emulation import error
from lowq_kernels.decode import latent, latent_prompt
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import Run, Runs

INTERPRETED_BF16 = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bit patterns of bf16")
BLOCK, BLOCKS = 16, 40
NAMES = [(s, "neighbours") for s in SHAPES] + [("odd", n) for n in FACTS if n != "neighbours"]


def cases(first):
    """Shapes and facts, each with one of two dtypes: in static caches with one, in paged ones, by the same kernels, with the
    other; and on a GPU with bf16."""
    turns = [(*name, (torch.float16, torch.float32)[(i + first) % 2]) for i, name in enumerate(NAMES)]
    return [*turns, *(pytest.param(*name, torch.bfloat16, marks=INTERPRETED_BF16) for name in NAMES)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(43)


def angles(f, S, dtype):
    turn = torch.rand(S, f.rotated // 2).repeat(1, 2) * 6
    return turn.cos().to(DEVICE, dtype), turn.sin().to(DEVICE, dtype)


@pytest.mark.parametrize(("shape", "name", "dtype"), cases(0), ids=str)
def test_prompts_of_a_static_cache(shape, name, dtype):
    start = (0, 37)[NAMES.index((shape, name)) // 2 % 2]  # each with every dtype
    f, B, T, S = facts(SHAPES[shape], dtype, **FACTS[name]), 2, 70, 128
    cache = randn(B, 1, S, f.rank + f.rotated, dtype=dtype)
    cache[:, :, start:] = float("nan")
    q, x = randn(B, T, f.heads * (f.nope + f.rotated), dtype=dtype), randn(B, T, f.rank + f.rotated, dtype=dtype)
    ours, theirs, tables = cache.clone(), cache.clone(), angles(f, S, dtype)
    y, expected = latent_prompt.prompt(q, x, ours, start, *tables, f), latent.prompt(q, x, theirs, start, *tables, f)
    assert y.dtype == dtype
    assert not latent_prompt.refuse(q, cache, f)
    for row, other in zip(y.flatten(0, 1), expected.flatten(0, 1), strict=True):
        assert error(row, other) < 2 * DTYPES[dtype]
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert error(ours.nan_to_num(), theirs.nan_to_num()) < DTYPES[dtype]


def pieces(f, dtype, tile):
    """Pieces of prompts of three texts with dummy rows between them: (cache, the arguments of `packed`)."""
    each = [Run(0, 1, 0, 20, 2), Run(3, 70, 0, 0, 0), Run(70, 75, 0, 65, 1)]
    table = 1 + torch.randperm(BLOCKS - 1)[: 4 * 9].reshape(4, 9)
    table[3] = 0
    pos, rows, tiles = torch.zeros(78, dtype=torch.int32), torch.full((78,), 3, dtype=torch.int32), []
    cache = torch.full((BLOCKS, 1, BLOCK, f.rank + f.rotated), float("nan"))
    for run in each:
        pos[run.first : run.end] = run.start + torch.arange(run.end - run.first)
        rows[run.first : run.end] = run.row
        tiles += [(t, min(t + tile, run.end)) for t in range(run.first, run.end, tile)]
        for i in range(run.start):
            cache[table[run.row, i // BLOCK], 0, i % BLOCK] = torch.randn(f.rank + f.rotated)
    there = (t.to(DEVICE, torch.int32) for t in (table, rows, pos, torch.tensor(tiles)))
    return cache.to(DEVICE, dtype), Packed(*there), Runs(each, 78, torch.device(DEVICE))


@pytest.mark.parametrize(("shape", "name", "dtype"), cases(1), ids=str)
def test_pieces_of_prompts_of_a_paged_cache(shape, name, dtype):
    f = facts(SHAPES[shape], dtype, **FACTS[name])
    cache, p, runs = pieces(f, dtype, 32)
    q, x = randn(78, f.heads * (f.nope + f.rotated), dtype=dtype), randn(78, f.rank + f.rotated, dtype=dtype)
    ours, theirs, tables = cache.clone(), cache.clone(), angles(f, 9 * BLOCK, dtype)
    y, expected = latent_prompt.packed(q, x, ours, p, *tables, f, runs), latent.packed(q, x, theirs, p, *tables, f)
    for run in runs.each:
        for i in range(run.first, run.end):
            assert error(y[i], expected[i]) < 2 * DTYPES[dtype]
    assert y.isfinite().all()
    assert torch.equal(ours[1:].isnan(), theirs[1:].isnan())
    assert error(ours[1:].nan_to_num(), theirs[1:].nan_to_num()) < DTYPES[dtype]
    other = Runs([*runs.each[:2], Run(70, 75, 0, 65, 0)], 78, runs.device)  # another text's latents
    assert not error(latent_prompt.packed(q, x, cache.clone(), p, *tables, f, other)[70:75], expected[70:75]) < 0.05


def test_calls_that_the_definition_computes():
    f = facts(SHAPES["odd"], torch.float16)
    q, cache = randn(1, 4, 21, dtype=torch.float16), randn(1, 1, 16, 11, dtype=torch.float32)
    assert "dtype" in latent_prompt.refuse(q, cache, f)
    with_bf16 = facts(SHAPES["odd"], torch.bfloat16)
    assert "weights" in latent_prompt.refuse(q, cache.half(), with_bf16)
