"""Sampling draws from the distribution it claims to, and never from outside it."""

import pytest
import torch

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
    wanted = (LOGITS[0] / 0.7).softmax(-1)
    assert (torch.bincount(drawn, minlength=6) / n - wanted).abs().max() < 0.012  # 4 sigma of a share near one half is 0.01
    assert 5 not in drawn.tolist()


def test_no_draw_leaves_the_restriction():
    assert set(pick(LOGITS.expand(5000, -1), temperature=5.0, top_k=2, seed=1)) == {0, 4}


def test_unlikely_tokens_of_a_large_vocabulary_stay_unlikely():
    """The 24-bit uniform behind an exponential race is exactly 0 now and then; that must not crown a token at random."""
    logits = torch.full((400, 128_000), -40.0)
    logits[:, 7] = 0.0
    assert set(pick(logits, temperature=1.0, seed=2)) == {7}


def test_penalty_lowers_tokens_seen():
    seen = torch.tensor([[True, False, False, True, False, False]])
    assert penalise(LOGITS, seen, 2.0).tolist()[0] == [1.0, 1.0, 0.0, -2.0, 2.5, -30.0]
