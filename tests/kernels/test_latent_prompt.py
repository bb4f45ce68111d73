"""Triton's prompts of latent attention against their definition, over static and paged caches whose other slots are NaN."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first triton import
pytest.importorskip("triton")

from latents import DEVICE, DTYPES, FACTS, SHAPES, facts, randn, truth

import emulation
from emulation import error
from lowq_cli.engine.graph import capture
from lowq_kernels.decode import latent, latent_prompt
from lowq_kernels.decode.reference import Packed
from lowq_kernels.decode.runs import Run, Runs, states_of

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
    assert not latent_prompt.refuse(dtype, cache, f)
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


NULL, TEXTS = 4, ((2, 20, 1), (0, 0, 67), (1, 65, 5), (3, 33, 70))  # of each text: its row, tokens before the pass, and of it


def of_pass(f, dtype, order):
    """The pieces of TEXTS in this order in one pass, as a recorded one reads them, with dummy rows before and between them:
    (cache, q, x, the arguments of `packed`, the truth, the rows of each text)."""
    M = 160
    cache = torch.full((BLOCKS, 1, BLOCK, f.rank + f.rotated), float("nan"), device=DEVICE, dtype=dtype)
    table = torch.zeros(5, 9, dtype=torch.int32)
    table[:4] = 1 + torch.randperm(BLOCKS - 1)[: 4 * 9].reshape(4, 9)
    q, x, tables = randn(M, f.heads * (f.nope + f.rotated), dtype=dtype), randn(M, f.rank + f.rotated, dtype=dtype), None
    pos, rows, at, each, expected = torch.zeros(M, dtype=torch.int32), torch.full((M,), NULL, dtype=torch.int32), 2, [], {}
    tables = angles(f, 9 * BLOCK, dtype)
    for row, start, n in (TEXTS[i] for i in order):
        whole = [torch.cat((randn(start, t.shape[1], dtype=dtype), t[at : at + n])) for t in (q, x)]
        if start:
            index = torch.arange(start, dtype=torch.int32, device=DEVICE)
            tiles = torch.tensor([[0, start]], dtype=torch.int32, device=DEVICE)
            before = Packed(table.to(DEVICE), torch.full_like(index, row), index, tiles)
            latent.packed(*(t[:start] for t in whole), cache, before, *tables, f)
        pos[at : at + n], rows[at : at + n] = start + torch.arange(n), row
        each.append(Run(at, at + n, 0, start, row))
        expected[row] = truth(*whole, start, tables, f)
        at += n + 1
    states = [torch.zeros(n, 4, dtype=torch.int32) for n in (6, 9)]
    for t, values in zip(states, states_of(each), strict=True):
        t[: len(values)] = torch.tensor(values)
    runs = Runs((), M, torch.device(DEVICE), torch.cat(states).to(DEVICE), 6)
    p = Packed(table.to(DEVICE), rows.to(DEVICE), pos.to(DEVICE), torch.zeros(0, 2, dtype=torch.int32, device=DEVICE))
    return cache, q, x, (p, *tables, f, runs), expected, each


@pytest.mark.parametrize(("shape", "name", "dtype"), cases(0), ids=str)
def test_a_pass_that_reads_all_lengths_on_the_device(shape, name, dtype):
    f = facts(SHAPES[shape], dtype, **FACTS[name])
    cache, q, x, operands, expected, each = of_pass(f, dtype, (0, 1, 2, 3))
    ours, theirs = cache.clone(), cache.clone()
    with mock.patch("torch.empty", emulation.poisoned), mock.patch.object(latent, "packed", None):
        y = latent_prompt.packed(q, x, ours, *operands)
    assert y.isfinite().all()
    for run in each:
        for i in range(run.first, run.end):
            assert error(y[i], expected[run.row][i - run.first]) < 2 * DTYPES[dtype]
    p = operands[0]
    spans = torch.tensor([(run.first, run.end) for run in each], dtype=torch.int32, device=DEVICE)
    latent.packed(q, x, theirs, replace(p, tiles=spans), *operands[1:])
    assert torch.equal(ours[1:].isnan(), theirs[1:].isnan())  # block 0 is that of dummy rows
    assert error(ours[1:].nan_to_num(), theirs[1:].nan_to_num()) < DTYPES[dtype]


@pytest.mark.parametrize("own", range(len(TEXTS)))
def test_the_bits_of_a_text_depend_on_no_other(own):
    """All other texts become NaN, those before the pass, too."""
    dtype = torch.float16
    f = facts(SHAPES["odd"], dtype)
    cache, q, x, operands, _, each = of_pass(f, dtype, (0, 1, 2, 3))
    run, p = each[own], operands[0]
    y = latent_prompt.packed(q, x, cache.clone(), *operands)
    others, blocks = torch.ones(len(q), dtype=torch.bool), torch.ones(BLOCKS, dtype=torch.bool)
    others[run.first : run.end], blocks[p.table[run.row].long().cpu()] = False, False
    for t, where in ((q, others), (x, others), (cache, blocks)):
        t[where.to(DEVICE)] = float("nan")
    again = latent_prompt.packed(q, x, cache, *operands)
    assert torch.equal(again[run.first : run.end], y[run.first : run.end])
    assert again.isnan().any()


def test_large_passes_of_known_texts_gather_their_latents():
    dtype = torch.float32
    f = facts(SHAPES["odd"], dtype)
    cache, q, x, operands, expected, each = of_pass(f, dtype, (1, 0, 3, 2))
    known = replace(operands[-1], each=each)
    for most, gathered in ((len(q), False), (len(q) - 1, True)):
        held = mock.Mock(side_effect=latent_prompt._held)
        with mock.patch.multiple(latent_prompt, MOST_ROWS=most, _held=held):
            y = latent_prompt.packed(q, x, cache.clone(), *operands[:-1], known)
        assert held.called == gathered
        for run in each:
            assert error(y[run.first : run.end], expected[run.row]) < DTYPES[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_graph_of_a_pass_is_replayed_for_other_texts():
    dtype = torch.bfloat16
    f = facts(SHAPES["as published, in small"], dtype)
    cache, q, x, operands, *_ = of_pass(f, dtype, (0, 1, 2, 3))
    made = []
    graph = capture(lambda: made.append(latent_prompt.packed(q, x, cache, *operands)))
    others = of_pass(f, dtype, (3, 1, 0, 2))
    expected = latent_prompt.packed(others[1], others[2], others[0].clone(), *others[3])
    (p, cos, sin, _, runs), (q2, x2, (p2, cos2, sin2, _, runs2)) = operands, others[1:4]
    given = (cache, q, x, p.table, p.rows, p.pos, cos, sin, runs.given)
    for place, new in zip(given, (others[0], q2, x2, p2.table, p2.rows, p2.pos, cos2, sin2, runs2.given), strict=True):
        place.copy_(new)
    graph.replay()
    assert torch.equal(made[-1], expected)


def test_calls_that_the_definition_computes():
    f = facts(SHAPES["odd"], torch.float16)
    q, cache = randn(1, 4, 21, dtype=torch.float16), randn(1, 1, 16, 11, dtype=torch.float32)
    assert "dtype" in latent_prompt.refuse(q.dtype, cache, f)
    with_bf16 = facts(SHAPES["odd"], torch.bfloat16)
    assert "weights" in latent_prompt.refuse(q.dtype, cache.half(), with_bf16)
    assert "512" in latent_prompt.refuse(q.dtype, cache.half(), facts((1, 4, 2, 4, 513), torch.float16))
    assert latent.DEFINITION.refuse(q.dtype, cache.half(), f)
