"""The numbers of a pass's prompt tokens: what the host packs is what the device's side takes apart, whatever the pieces are."""

import random

import numpy as np
import pytest
import torch

from lowq_cli.serving.pass_sizes import RIDING, PassSizes
from lowq_cli.serving.prompt_chunk import ChunkLayout, Piece, most_ends, runs_of
from lowq_kernels.decode.runs import states_of

NULL, TILE = 40, 16


def some_pieces(rng, room):
    """Pieces of prompts of `room` tokens at most in all; about half of the prompts end in the pass."""
    pieces = []
    while room > 0 and len(pieces) < 5:
        n, first = rng.randint(1, min(room, 70)), rng.randint(0, 500)
        tokens = [rng.randrange(1, 999) for _ in range(n)]
        pieces.append(Piece(10 + len(pieces), first, tokens, rng.choice([-1, len(pieces)]), slot=3 + len(pieces)))
        room -= n
    return pieces


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_each_token_gets_its_row_and_each_ending_prompt_a_row_of_logits(seed, padded, recurrent):
    rng = random.Random(seed)
    b, pieces = rng.choice([0, 8]), some_pieces(rng, 192)
    C = 192 if padded else sum(len(p.tokens) for p in pieces)
    layout = ChunkLayout(b, C, TILE, NULL, padded, recurrent)
    drawn, runs = np.arange(b // 2, dtype=np.int32), runs_of(pieces)
    chunk, n = layout.pack(pieces, drawn, runs)
    assert chunk.dtype == np.int32
    states, ids, pos, rows, tiles, take, target = layout.unpack(torch.from_numpy(chunk), n)
    expected = [(t, p.first + i, p.row) for p in pieces for i, t in enumerate(p.tokens)]
    expected += [(0, 0, NULL)] * (C - len(expected))
    assert list(zip(ids.tolist(), pos.tolist(), rows.tolist(), strict=True)) == expected
    covered = [row for first, end in tiles.tolist() for row in range(first, end)]
    assert covered == list(range(sum(len(p.tokens) for p in pieces)))
    assert all(len({*rows[first:end].tolist()}) <= 1 for first, end in tiles.tolist())
    assert all(end - first <= TILE for first, end in tiles.tolist())
    ends = [(b + run.end - 1, p.target) for p, run in zip(pieces, runs, strict=True) if p.target >= 0]
    logits = [*zip(range(b), [*drawn.tolist(), *[NULL] * (b - len(drawn))], strict=True), *ends]
    assert list(zip(take.tolist(), target.tolist(), strict=True))[: len(logits)] == logits
    assert {*target[len(logits) :].tolist()} <= {NULL}
    if padded:
        empty, m = layout.pack()
        assert (len(empty), m) == (len(chunk), n)
        assert len(take) == b + most_ends(C)
    of_runs, of_tiles = states_of(runs) if padded and recurrent else ((), ())
    for given, expected in zip(states.split([*layout.states]), (of_runs, of_tiles), strict=True):
        assert given.tolist() == [*map(list, expected), *[[0] * 4] * (len(given) - len(expected))]


@pytest.mark.parametrize("most", [1, 6, 128])
def test_a_pass_has_room_for_its_rows_and_is_no_larger_than_the_next_size(most):
    sizes = PassSizes(most)
    for n in range(1, most + 1):
        assert n <= sizes.bucket(n) <= most
        assert sizes.riding(n) <= max(RIDING, 2 * n)
        for tokens in (1, 30, 256 - sizes.riding(n), 500, 3000):
            b, M = sizes.size(n, tokens)
            assert b >= min(n, most)
            assert b + tokens <= M
            assert M in sizes.totals
            assert not any(b + tokens <= t < M for t in sizes.totals)
        assert sizes.size(n) == (sizes.bucket(n),) * 2
    exact = PassSizes(most, padded=False)
    assert exact.size(1, 30) == (1, 31)
    assert (0, 32) in sizes.recorded()
    assert PassSizes(most, largest=16).keys[-1][1] <= 16
    fixed = PassSizes(most, fixed=True)
    assert {fixed.bucket(n) for n in range(1, most + 1)} == {most}
    assert list(fixed.recorded()) == [(most, most), (0, 512)]
