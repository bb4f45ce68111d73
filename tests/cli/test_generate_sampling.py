"""Sampling draws from the distribution it claims to, and never from outside it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowq_cli.engine.sampling import LEAST, Sampler, Sampling, penalise, restrict
from lowq_kernels.decode import TORCH
from lowq_packers.errors import DamagedError

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 2.5, -30.0]])


def pick(logits: torch.Tensor, **how: float) -> list[int]:
    sampler = Sampler(TORCH.choose, *logits.shape, logits.device)
    one = torch.zeros(len(logits), 1, dtype=torch.int64)
    sampler.start(Sampling(**how), one, one == 0)
    sampler.choose(logits, advance=0)
    return sampler.token.tolist()


def test_greedy_is_the_argmax():
    assert pick(LOGITS) == [4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_greedy_takes_the_first_of_several_equal_logits(dtype):
    logits = torch.randint(-9, 10, (50, 700), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert pick(logits) == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("right", range(5))
def test_rows_of_one_text_draw_the_same_tokens_as_one_after_the_other(how, right):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    samplers = [Sampler(TORCH.choose, 1, 40, logits.device) for _ in range(2)]
    for sampler in samplers:
        sampler.start(Sampling(**how), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool))
    one, together = samplers
    expected = []
    for row in logits[: right + 1]:
        one.choose(row[None], advance=1)
        expected.append(int(one.token))
    drafts = [*expected, *[0] * 5][:4]
    if right < 4:
        drafts[right] = (expected[right] + 1) % 40  # the next row's draft is wrong: what comes after it is not drawn
        logits[right + 1 :] = torch.nan
    assert together.follow(logits, drafts) == expected
    for a, b in zip(one.state, together.state, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(together.logits, logits[right : right + 1])
    logits[0] = torch.nan
    with pytest.raises(DamagedError, match="is NaN or infinite"):
        together.follow(logits, drafts)


def test_a_model_that_answers_in_nan_is_an_error():
    """Weights too large for their dtype: the draw was token 0, the text empty, the exit code 0."""
    for value in (torch.nan, torch.inf):
        with pytest.raises(DamagedError, match="is NaN or infinite: weights or activations overflow float32"):
            pick(LOGITS.where(LOGITS < 2, value))
    assert pick(LOGITS.where(LOGITS > 2, -torch.inf)) == [4]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_the_least_temperature_is_the_argmax(top_p):
    assert pick(LOGITS * 4e3, temperature=LEAST, top_p=top_p) == [4]
    assert (penalise(LOGITS * 4e3, LOGITS < 9, LEAST) / LEAST).isfinite().all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3, 4, 5]),
        (2, 1.0, [0, 4]),
        (0, 0.6, [0, 4]),  # sorted p = .51 .31 .11 ...: the first alone holds less than 0.6
        (0, 0.5, [4]),
        (0, 0.01, [4]),
        (1, 0.99, [4]),
        (3, 0.9, [0, 1, 4]),
        (100, 1.0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_restrict_keeps_the_top(top_k, top_p, kept):
    assert restrict(LOGITS, top_k, top_p).isfinite().nonzero()[:, 1].tolist() == kept


def test_draws_follow_the_probabilities():
    n = 40_000
    drawn = torch.tensor(pick(LOGITS.expand(n, -1), temperature=0.7))
    expected = (LOGITS[0] / 0.7).softmax(-1)
    assert (torch.bincount(drawn, minlength=6) / n - expected).abs().max() < 0.012  # 4 sigma of a share near one half is 0.01
    assert 5 not in drawn.tolist()


@given(
    st.lists(st.sampled_from([-math.inf, -90.0, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0, 60.0]), min_size=1, max_size=40),
    st.integers(0, 45),
    st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_what_is_kept_is_what_the_definition_keeps(scores, top_k, top_p):
    """With ties, tokens that a mask excludes, and probabilities that are 0; one score at a time, in fp64."""
    if max(scores) == -math.inf:
        return
    by_score = sorted(scores, reverse=True)
    floor = by_score[top_k - 1] if 0 < top_k < len(scores) else -math.inf
    share = {s: math.exp(s - by_score[0]) * by_score.count(s) for s in set(scores) if s >= floor}
    total, likelier, close = sum(share.values()), 0.0, False
    kept = set()
    for s in sorted(share, reverse=True):
        close |= top_p < 1 and abs(likelier / total - top_p) < 1e-6
        if top_p >= 1 or s == by_score[0] or (likelier / total < top_p and share[s] > 1e-30):
            kept.add(s)
        likelier += share[s]
    result = restrict(torch.tensor([scores]), top_k, top_p)[0].tolist()
    if not close:
        assert result == [s if s in kept else -math.inf for s in scores]


def test_positions_and_seeds_draw_independently():
    """Tokens at 4,000 positions of each of three seeds: pairs of neighbours, and of seeds, are as often as their product."""
    n, V = 4000, 8
    logits = torch.zeros(n, V)
    drawn = []
    for seed in (0, 1, 12345):
        token, pos = torch.zeros(n, dtype=torch.int64), torch.arange(n, dtype=torch.int32)
        rows = torch.arange(n, dtype=torch.int32)
        TORCH.choose_rows(logits, rows, token, pos, torch.full((n,), seed), torch.ones(n))
        drawn.append(token)
    pairs = [(d[:-1], d[1:]) for d in drawn] + [(drawn[0], d) for d in drawn[1:]]
    for a, b in pairs:
        counts = torch.bincount(a * V + b, minlength=V * V).double()
        expected = len(a) / V**2
        assert ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom: over 120 once in 50,000 times


def test_no_draw_leaves_the_restriction():
    assert set(pick(LOGITS.expand(5000, -1), temperature=5.0, top_k=2, seed=1)) == {0, 4}


def test_unlikely_tokens_of_a_large_vocabulary_stay_unlikely():
    """In 51 million exponential numbers of 24 bits, some would be exactly 0, and their tokens would win at any probability."""
    logits = torch.full((400, 128_000), -40.0)
    logits[:, 7] = 0.0
    assert set(pick(logits, temperature=1.0, seed=2)) == {7}


def test_penalty_lowers_tokens_seen():
    seen = torch.tensor([[True, False, False, True, False, False]])
    assert penalise(LOGITS, seen, 2.0).tolist()[0] == [1.0, 1.0, 0.0, -2.0, 2.5, -30.0]
